"""Disable the paths of NCCL that GeForce RTX 40 cards lack, as Accelerate's launcher does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from accel_callbacks.launch.machine import GpuDriver

__all__ = ["nccl_workarounds"]

_WITHOUT_PEERS = re.compile(r"GeForce RTX 40\d\d\b")
_FIRST_RIGHT_DRIVER = (550, 40, 7)  # it tells NCCL by itself that the cards have no peer access
_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")


def nccl_workarounds(gpus: Sequence[GpuDriver], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for several processes on a machine with these GPUs.

    Older drivers claim peer access between GeForce RTX 40 cards, and NCCL hangs or fails. Variables
    that are set already stay.

    Args:
        gpus: those of the machine.
        environment: usually ``os.environ``.
    """
    concerned = [gpu for gpu in gpus if _WITHOUT_PEERS.search(gpu.name)]
    old = any(_version(gpu.driver) < _FIRST_RIGHT_DRIVER for gpu in concerned)
    if len(gpus) < 2 or not old:
        return {}
    return {name: "1" for name in _VARIABLES if name not in environment}


def _version(text: str) -> tuple[int, ...]:
    """Return a version as numbers; one that cannot be read counts as old."""
    return tuple(int(part) for part in text.split(".") if part.isdecimal() and len(part) < 8)
