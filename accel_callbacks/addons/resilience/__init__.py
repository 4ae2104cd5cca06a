"""What keeps a run alive: its state in host memory, for restarts of its launch."""
