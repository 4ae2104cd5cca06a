"""The built-in trackers, one per file."""
