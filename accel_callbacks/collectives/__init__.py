"""Collectives over nested structures of tensors, and over plain objects.

Scripts enter by ``gather``, ``reduce``, ``broadcast`` and ``pad_across_processes`` (``tensors``)
and their twins for objects (``objects``); metrics by ``gather_counted``, which drops repeated
samples (``metrics``). The rooms above take ranks, store and groups from here (``group``,
``store``). All functions also work on one process, where at most the container is a new one.

Each collective begins with ``begin``, which refuses one that could not end, and raises by
``explained`` what happened to a rank that broke it. None may raise on one rank before the others
have come to it: what only this rank knows to be wrong is sent along, and raised on all. Nothing
here knows an Accelerator, and nothing that is pickled leaves the run (``objects``).
"""

from accel_callbacks.collectives.group import adopt_store as adopt_store
from accel_callbacks.collectives.group import before_collectives as before_collectives
from accel_callbacks.collectives.group import control_group as control_group
from accel_callbacks.collectives.group import current_turn as current_turn
from accel_callbacks.collectives.group import default_group as default_group
from accel_callbacks.collectives.group import expect_group as expect_group
from accel_callbacks.collectives.group import explained as explained
from accel_callbacks.collectives.group import explains_with as explains_with
from accel_callbacks.collectives.group import group_for as group_for
from accel_callbacks.collectives.group import group_timeout as group_timeout
from accel_callbacks.collectives.group import has_device_backend as has_device_backend
from accel_callbacks.collectives.group import has_peers as has_peers
from accel_callbacks.collectives.group import join_control_group as join_control_group
from accel_callbacks.collectives.group import leave_control_group as leave_control_group
from accel_callbacks.collectives.group import next_number as next_number
from accel_callbacks.collectives.group import on_backend as on_backend
from accel_callbacks.collectives.group import rank as rank
from accel_callbacks.collectives.group import refuse_in_turn as refuse_in_turn
from accel_callbacks.collectives.group import run_before as run_before
from accel_callbacks.collectives.group import store as store
from accel_callbacks.collectives.group import turn as turn
from accel_callbacks.collectives.group import world_size as world_size
from accel_callbacks.collectives.nested import map_leaves as map_leaves
from accel_callbacks.collectives.nested import map_tensors as map_tensors
from accel_callbacks.collectives.nested import refuse_others as refuse_others
from accel_callbacks.collectives.nested import tensors_in as tensors_in
from accel_callbacks.collectives.objects import Posted as Posted
from accel_callbacks.collectives.objects import all_objects as all_objects
from accel_callbacks.collectives.objects import any_process as any_process
from accel_callbacks.collectives.objects import barrier as barrier
from accel_callbacks.collectives.objects import begin as begin
from accel_callbacks.collectives.objects import (
    broadcast_object,
    broadcast_object_list,
    gather_object,
)
from accel_callbacks.collectives.objects import exchange as exchange
from accel_callbacks.collectives.objects import send_object as send_object
from accel_callbacks.collectives.sharded import copy_part as copy_part
from accel_callbacks.collectives.sharded import full_tensor as full_tensor
from accel_callbacks.collectives.sharded import gather_sharded as gather_sharded
from accel_callbacks.collectives.sharded import is_sharded as is_sharded
from accel_callbacks.collectives.sharded import shard_like as shard_like
from accel_callbacks.collectives.store import BoundedStore as BoundedStore
from accel_callbacks.collectives.tensors import broadcast, gather, pad_across_processes, reduce
from accel_callbacks.collectives.tensors import compare as compare
from accel_callbacks.collectives.tensors import gather_sized as gather_sized
from accel_callbacks.collectives.tensors import numbers_to_tensors as numbers_to_tensors
from accel_callbacks.collectives.tensors import rows_held as rows_held
from accel_callbacks.collectives.tensors import rows_of as rows_of

__all__ = [
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
]
