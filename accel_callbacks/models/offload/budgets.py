"""Budgets in bytes for each device: the user's, or the free memory of this machine."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import TypeAlias

import torch

from accel_callbacks.errors import nearest
from accel_callbacks.models.offload.sizes import convert_file_size_to_int
from checkpoint_io.warning import warn

__all__ = ["STORES", "Device", "budgets_of", "get_max_memory"]

Device: TypeAlias = "int | str"
STORES = ("cpu", "disk")


def budgets_of(memory: Mapping[Device, int | float | str | None]) -> dict[Device, int | None]:
    """Return bytes by device, in the order in which devices are filled: accelerators, cpu, disk.

    Args:
        memory: bytes, or text such as ``"8GB"``, or None for no limit, by device. Disk has no limit
            if it is not there.

    Raises:
        ValueError: a device or a size that is none.
    """
    sizes = {device: _bytes_of_budget(device, size) for device, size in memory.items()}
    return {device: sizes.get(device) for device in sorted({*sizes, "disk"}, key=_sort_key)}


def _bytes_of_budget(device: Device, size: int | float | str | None) -> int | None:
    if size is None:
        return None
    whole = int(size) if isinstance(size, float) else size
    try:
        return convert_file_size_to_int(whole)
    except ValueError as error:
        raise ValueError(f"the budget of {device!r}: {error}") from None


def _sort_key(device: Device) -> tuple[int, str, int]:
    """Return the sort key of a device in a dict of budgets."""
    if isinstance(device, int) and not isinstance(device, bool):
        return 0, "", device
    if device in STORES:
        return 2 + STORES.index(str(device)), "", 0
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = None
    if parsed is None or parsed.type in ("cpu", "meta"):
        hint = nearest(str(device), [*STORES, "mps", "cuda:0"])
        raise ValueError(
            f"{device!r} is no device of a budget: give numbers of accelerators, names such as "
            f"'cuda:1' or 'mps', 'cpu' and 'disk'.{hint}"
        )
    return 1, parsed.type, parsed.index or 0


def get_max_memory(
    max_memory: Mapping[Device, int | float | str] | None = None,
) -> dict[Device, int]:
    """Return the bytes to use of each device: those given, or those that are free here.

    What torch's allocator keeps for later counts as free, and of the host's memory what the control
    group of this process leaves it. A device that shares the host's memory gets it, and ``"cpu"``
    nothing.

    Args:
        max_memory: bytes, or text such as ``"8GB"``, by device: the number of an accelerator, its
            name, ``"cpu"`` or ``"disk"``. It is returned in the order in which devices are filled.

    Raises:
        ValueError: a device or a size that is none.

    Example:
        >>> from accel_callbacks.utils import get_max_memory
        >>> get_max_memory({"cpu": "16GB", 0: "8GB"})
        {0: 8000000000, 'cpu': 16000000000}
    """
    if max_memory is None:
        return _free_memory()
    sizes = {
        device: nbytes
        for device, nbytes in budgets_of(max_memory).items()
        if device in max_memory and nbytes is not None
    }
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    absent = [device for device in sizes if isinstance(device, int) and not 0 <= device < count]
    if absent and count:  # without any, the plan is for another machine
        warn(
            f"max_memory has a budget for {', '.join(map(str, absent))}, and the accelerators here "
            f"are {', '.join(map(str, range(count)))}: leave it out, or plan for another machine."
        )
    return sizes


def _free_memory() -> dict[Device, int]:
    """Return the free bytes of each device of this machine."""
    memory: dict[Device, int] = {}
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None and kind.type == "mps":
        return {"mps": host_memory()}
    shared = False
    if kind is not None:
        module = torch.get_device_module(kind)
        for index in range(torch.accelerator.device_count()):
            free = _free(module, index)
            if free is not None:
                memory[index] = free
                shared = shared or _is_integrated(module, index)
    if not shared:
        memory["cpu"] = host_memory()
    return memory


def _is_integrated(module: ModuleType, index: int) -> bool:
    """Return whether an accelerator uses the host's memory."""
    properties = getattr(module, "get_device_properties", None)
    return bool(properties and getattr(properties(index), "is_integrated", False))


def _free(module: ModuleType, index: int) -> int | None:
    """Return the free bytes of an accelerator, None if it cannot be asked."""
    try:
        free, _ = module.mem_get_info(index)
        # What the allocator keeps is not free for the driver, and is for us.
        cached = int(module.memory_reserved(index)) - int(module.memory_allocated(index))
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    return int(free) + max(0, cached)


def host_memory() -> int:
    """Return the bytes of the host's memory that this process can still take."""
    from checkpoint_io.memory import free_memory

    free = free_memory()
    if free is not None:
        return free
    with suppress(ImportError):
        return int(importlib.import_module("psutil").virtual_memory().available)
    if sys.platform != "win32":
        with suppress(OSError, ValueError):  # without psutil: all there is
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    raise RuntimeError(
        "how much memory this machine has is not known without psutil: pip install psutil, or "
        'give it, as max_memory={"cpu": "16GB"}.'
    )
