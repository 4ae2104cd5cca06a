"""Models: compiled, loaded, sized, and evaluated without side effects."""
