"""Tasks from SWE-bench and from data sets of the same kind: real issues, judged by the tests that came with their fixes."""
