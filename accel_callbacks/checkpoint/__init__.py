"""The training state of an Accelerator: captured, saved, found, checked, restored."""
