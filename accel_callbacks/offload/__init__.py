"""Models larger than memory: a plan, weights on demand, Accelerate's names for both."""
