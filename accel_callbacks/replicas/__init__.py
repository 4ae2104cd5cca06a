"""Replicas that come and go: their quorum, the state of a newcomer, and shares of the data."""
