"""Each rank has a part of every sequence."""
