"""Scripts that import ``accelerate`` are no modules of tests."""

collect_ignore = ["parity_cases.py", "programs"]
