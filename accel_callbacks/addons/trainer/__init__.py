"""Our callbacks and checkpoints in the Trainer of transformers."""
