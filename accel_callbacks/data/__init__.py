"""Data: order as a pure function of (seed, epoch), sharding, and the prepared loader."""
