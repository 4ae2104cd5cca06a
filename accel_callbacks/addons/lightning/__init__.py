"""Lightning: its callbacks in our loop, ours in its Trainer."""
