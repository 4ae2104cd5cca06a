"""Each rank has a shard of every parameter, which are gathered unit by unit."""
