"""Assign the parts of tensors to the ranks that write and read them.

A part is a box: offsets and lengths in the whole tensor. `dtensor` finds the boxes of a DTensor on
a rank, `local_tensors` lists what a rank holds, `planner.plan_writes` gives each box to one rank
that writes it, `planner.plan_reads` finds the stored boxes that fill a target, and `boxes` has the
geometry.

A plan is made on each rank for itself, and must come out the same on all: it is a function of what
they have told each other, in the order of the ranks. Nothing here communicates.
"""

from checkpoint_io.sharding.dtensor import is_dtensor as is_dtensor
from checkpoint_io.sharding.dtensor import local_boxes as local_boxes
from checkpoint_io.sharding.dtensor import local_of as local_of
