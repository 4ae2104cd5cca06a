"""Trackers: one file each."""
