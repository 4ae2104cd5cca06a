"""Models: compile, load, estimate memory, and evaluate without side effects."""
