"""Each rank has a part of every layer that is split."""
