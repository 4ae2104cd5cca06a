"""The tools of the fault tests: processes to kill, a lying disk, a proxy that breaks requests."""
