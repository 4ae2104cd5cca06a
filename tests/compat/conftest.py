"""``parity_cases.py`` is a script that imports ``accelerate``, not a module of tests."""

collect_ignore = ["parity_cases.py"]
