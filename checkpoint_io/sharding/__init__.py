"""Assign the parts of tensors to the ranks that write and read them."""

from checkpoint_io.sharding.dtensor import is_dtensor as is_dtensor
from checkpoint_io.sharding.dtensor import local_boxes as local_boxes
from checkpoint_io.sharding.dtensor import local_of as local_of
