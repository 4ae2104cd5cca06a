"""DeepSpeed trains the model."""
