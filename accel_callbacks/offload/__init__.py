"""Models larger than memory: plans, hooks, offload folders."""
