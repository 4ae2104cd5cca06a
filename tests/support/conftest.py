"""Nothing but what pytest is to leave alone."""

collect_ignore = ["warm_server.py"]  # a program, which imports what lies beside it
