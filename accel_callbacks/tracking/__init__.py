"""Trackers of a run."""
