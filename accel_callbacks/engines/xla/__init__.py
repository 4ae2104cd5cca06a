"""One process for each XLA device, with or without sharding."""
