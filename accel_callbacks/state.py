"""The frozen facts of this process (rank, world, device, backend) and the handles over them."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

__all__ = ["DistributedType", "Topology", "destroy_topology", "process_rank", "resolve_topology"]


class DistributedType(str, Enum):
    """What kind of run this is; the names follow Hugging Face Accelerate.

    Example:
        >>> from accel_callbacks import DistributedType
        >>> DistributedType.NO == "NO"
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"


@dataclass(frozen=True)
class Topology:
    """Where this process stands among all processes of the run. It never changes.

    Args:
        device: the device that this process computes on.
        rank: index among all processes, from 0.
        world_size: number of processes.
        local_rank: index among the processes of this machine.
        local_world_size: number of processes on this machine.
        backend: torch.distributed backend string, or ``None`` for a single process.

    Example:
        >>> import torch
        >>> from accel_callbacks import Topology
        >>> Topology(device=torch.device("cpu"), rank=1, world_size=2).distributed_type.value
        'MULTI_CPU'
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    backend: str | None = None

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        if self.world_size == 1:
            return DistributedType.NO
        on_cpu = self.device.type == "cpu"
        return DistributedType.MULTI_CPU if on_cpu else DistributedType.MULTI_GPU


_current: Topology | None = None
_owns_group = False
_exit_hook_set = False


def resolve_topology(*, cpu: bool = False, timeout: timedelta | None = None) -> Topology:
    """Find out where this process stands, joining the process group on the first call.

    The answer is a fact of the process: later calls return the same object.

    Args:
        cpu: compute on the CPU even where an accelerator is there.
        timeout: how long a collective may wait; torch's default where ``None``.

    Raises:
        RuntimeError: the launcher's variables are incomplete, there are more processes than
            devices, or the process already settled on another device.

    Example:
        >>> from accel_callbacks.state import resolve_topology
        >>> resolve_topology(cpu=True).world_size
        1
    """
    global _current
    if _current is None:
        _current = _detect(cpu, timeout, os.environ)
    elif cpu and _current.device.type != "cpu":
        raise RuntimeError(
            f"cpu=True was asked for, but this process already computes on {_current.device}. "
            "The device belongs to the process: pass cpu=True to the first Accelerator or "
            "PartialState, or start the script with `accel launch --cpu`."
        )
    return _current


def destroy_topology() -> None:
    """Leave the process group (if we joined it) and forget the topology.

    Dead models are collected first: a gloo worker thread that frees a tensor after the
    interpreter began to finalise aborts the process.

    Example:
        >>> from accel_callbacks.state import destroy_topology, resolve_topology
        >>> _ = resolve_topology(cpu=True)
        >>> destroy_topology()
    """
    global _current, _owns_group
    _current = None
    if _owns_group and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
    _owns_group = False


def process_rank() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size) of this process.

    From the topology, else a process group that the script has made, else the environment. Works
    before any Accelerator exists, so that decorators can be used at import time.

    Example:
        >>> from accel_callbacks.state import process_rank
        >>> process_rank()
        (0, 1, 0, 1)
    """
    here = _current
    if here is not None:
        return here.rank, here.world_size, here.local_rank, here.local_world_size
    return _group_ranks(os.environ) or _ranks_from(os.environ)


def _group_ranks(env: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """The ranks in the process group that is there, None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    return rank, world, _number(env, "LOCAL_RANK", rank), _number(env, "LOCAL_WORLD_SIZE", world)


def _ranks_from(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    world = _number(env, "WORLD_SIZE", 1)
    if world > 1 and "RANK" not in env:
        raise RuntimeError(
            "WORLD_SIZE is set but RANK is not: start the script with `accel launch` or "
            "`torchrun`, or unset WORLD_SIZE for a single process."
        )
    rank = _number(env, "RANK", 0)
    if not 0 <= rank < world:
        raise RuntimeError(
            f"RANK={rank} is not among the ranks 0 to WORLD_SIZE - 1 (WORLD_SIZE={world}): start "
            "the script with `accel launch` or `torchrun`, or unset both for a single process."
        )
    local_rank = _number(env, "LOCAL_RANK", rank)
    return rank, world, local_rank, _number(env, "LOCAL_WORLD_SIZE", world)


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    """A variable of the launcher."""
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(
            f"{name}={text!r} is no whole number: start the script with `accel launch` or "
            f"`torchrun`, or unset {name} for a single process."
        ) from None


def _detect(cpu: bool, timeout: timedelta | None, env: Mapping[str, str]) -> Topology:
    joined = _group_ranks(env)
    if joined is not None:
        return Topology(_pick_device(cpu, joined[2]), *joined, backend=dist.get_backend())
    rank, world, local_rank, local_world = _ranks_from(env)
    device = _pick_device(cpu, local_rank)
    backend = _join(device, rank, world, timeout, env) if world > 1 else None
    return Topology(device, rank, world, local_rank, local_world, backend)


def _pick_device(cpu: bool, local_rank: int) -> torch.device:
    if cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise RuntimeError(
            f"local rank {local_rank} has no device: this machine shows {count}. Start at most "
            f"{count} processes here, or pass --cpu to `accel launch`."
        )
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    # torch 2.6 has it under its older name only
    select = getattr(torch.accelerator, "set_device_index", None)
    (select or torch.accelerator.set_device_idx)(local_rank)
    return torch.device(kind.type, local_rank)


def _join(
    device: torch.device, rank: int, world: int, timeout: timedelta | None, env: Mapping[str, str]
) -> str:
    global _owns_group, _exit_hook_set
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise RuntimeError(
            f"{' and '.join(missing)} not set for {world} processes: start the script with "
            "`accel launch --num_processes N` or `torchrun`."
        )
    backend = "gloo"
    if device.type != "cpu":
        # Both, so that objects and CPU tensors never travel through device memory.
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    store, _, _ = next(rendezvous("env://", rank, world))
    # A restarted worker must not read the addresses that the attempt before it left behind.
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.distributed_c10d.PrefixStore(f"accel_callbacks/attempt{attempt}", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    _owns_group = True
    if not _exit_hook_set:
        atexit.register(destroy_topology)
        _exit_hook_set = True
    return backend
