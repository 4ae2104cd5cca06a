"""Model weights in the open layouts."""
