"""Where bytes go: local disks and everything behind fsspec."""
