"""Assign the parts of tensors to the ranks that write and read them."""

from checkpoint_io.sharding.dtensor import is_dtensor as is_dtensor
