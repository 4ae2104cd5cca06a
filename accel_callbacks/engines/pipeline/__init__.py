"""Each rank has some stages of the model."""
