"""Software engineering: agents that mend code in a sandbox, and graders that run tests on what they changed."""
