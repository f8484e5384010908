"""What runs inside a sandbox, beside a package's tests: the standard library and pytest only, since nothing else is there."""
