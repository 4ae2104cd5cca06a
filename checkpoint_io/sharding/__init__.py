"""Assign the parts of tensors to the ranks that write and read them."""
