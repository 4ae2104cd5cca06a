"""Folders of checkpoints: discovery, fallback, retention."""
