"""The device of this process."""

from __future__ import annotations

import os

import torch

__all__ = ["own_accelerator", "pick_device", "select_device"]


def own_accelerator() -> torch.device | None:
    """The kind of accelerator that this machine has; a torch built for one names it regardless.

    Example:
        >>> import torch
        >>> from accel_callbacks.devices import own_accelerator
        >>> (own_accelerator() is not None) == torch.accelerator.is_available()
        True
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def pick_device(cpu: bool, local_rank: int) -> torch.device:
    """The device of the process with this index on its machine, made torch's current one.

    Args:
        cpu: leave other devices alone.
        local_rank: index among the processes of this machine, which is that of its device.

    Raises:
        RuntimeError: this machine has fewer devices.

    Example:
        >>> from accel_callbacks.devices import pick_device
        >>> pick_device(cpu=True, local_rank=1)
        device(type='cpu')
    """
    kind = None if cpu else own_accelerator()
    if kind is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if count == 1 and _alone_with_its_device(local_rank):
        local_rank = 0
    if local_rank >= count:
        raise RuntimeError(
            f"local rank {local_rank} has no device: this machine shows {count}. Start at most "
            f"{count} processes here, or pass --cpu to `accel launch`."
        )
    device = torch.device(kind.type, local_rank)
    select_device(device)
    return device


# What sets each process apart on its machine where a scheduler starts them, one task a process.
_TASK_INDEX = (
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
)


def _alone_with_its_device(local_rank: int) -> bool:
    """A scheduler started this process and shows it one device, its own: `srun --gpus-per-task=1`.

    Under torchrun the index is that of the launcher, 0, and processes must not share a device.
    """
    return any(os.environ.get(name) == str(local_rank) for name in _TASK_INDEX)


def select_device(device: torch.device) -> None:
    """Make a device the current one of torch in this thread; nothing to do for the CPU.

    Example:
        >>> import torch
        >>> from accel_callbacks.devices import select_device
        >>> select_device(torch.device("cpu"))
    """
    if device.type != "cpu":
        # torch 2.6 has it under its older name only
        select = getattr(torch.accelerator, "set_device_index", None)
        (select or torch.accelerator.set_device_idx)(device.index or 0)
