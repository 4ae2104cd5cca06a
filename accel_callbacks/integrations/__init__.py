"""Callbacks of other trainers in ours, and ours in theirs."""
