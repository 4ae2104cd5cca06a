"""Names that scripts import from ``accelerate.utils``; re-exported, nothing is defined here."""

from accel_callbacks.collectives import (
    broadcast,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accel_callbacks.config import ProjectConfiguration
from accel_callbacks.data.device import send_to_device
from accel_callbacks.rng import set_seed
from accel_callbacks.state import DistributedType

__all__ = [
    "DistributedType",
    "ProjectConfiguration",
    "broadcast",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
    "set_seed",
]
