"""Checks of an installation, which ``accel test`` launches on each process."""
