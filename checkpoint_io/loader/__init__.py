"""Load checkpoints: open, match, verify, read."""
