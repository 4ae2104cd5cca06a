"""Which rank writes and reads which part of a tensor; the only door to torch's planners."""
