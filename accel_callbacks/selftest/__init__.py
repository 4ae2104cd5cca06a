"""What ``accel test`` runs on each process: ``python -m accel_callbacks.selftest``."""
