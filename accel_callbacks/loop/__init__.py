"""The training loop: passes, windows, steps, and the run around them."""
