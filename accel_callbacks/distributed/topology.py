"""Resolve the frozen topology of this process: rank, world size, device and backend."""

from __future__ import annotations

import atexit
import functools
import gc
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import (
    abort_devices,
    end_daemon_threads,
    explain,
    group_is_aborted,
    leave_aborted_group,
    register_daemon_thread,
    wait_for_exempt_groups,
    watch_ranks,
)
from accel_callbacks.distributed.heartbeat import current_heartbeat, stop_heartbeat
from accel_callbacks.distributed.process_group import (
    GroupOptions,
    backend_for,
    connect,
    join_group,
    store_outlives,
)
from accel_callbacks.distributed.rank_warnings import (
    show_warnings_once,
    show_warnings_plainly,
)
from accel_callbacks.errors.rank_report import install_excepthook
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.plugins.distributed_type import DistributedType

__all__ = [
    "Ranks",
    "Topology",
    "current_device_index",
    "destroy_topology",
    "is_current",
    "is_initialized",
    "own_accelerator",
    "pick_device",
    "process_rank",
    "resolve_topology",
    "select_device",
]

# Local ranks as set by schedulers that start one task per process.
_TASK_INDEX = (
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
)

# Global, as the default process group of torch is.
_current: Topology | None = None
_group: ReferenceType[Any] | None = None  # the default group that it describes
_owns_group = False
_copies: int | None = None  # ranks that read the same data; None if no Accelerator has said it
_joined_with: GroupOptions | None = None  # None if the script or another library made the group


@dataclass(frozen=True)
class Topology:
    """The rank, device and backend of this process. They never change.

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

    # Read several times a step by scripts that ask what kind of run this is.
    @functools.cached_property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        from accel_callbacks.plugins.distributed_type import DistributedType

        return DistributedType.of(self.device.type, self.world_size)


def resolve_topology(
    *,
    cpu: bool = False,
    timeout: timedelta | None = None,
    backend: str | None = None,
    init_method: str | None = None,
    anew: bool = False,
    find_device: Callable[[Mapping[str, str]], torch.device | None] | None = None,
) -> Topology:
    """Return the topology of this process, joining the process group on the first call.

    The topology is global to the process: later calls return the same object, as long as the script
    does not destroy or replace the process group. Then the next call describes the script's new
    group, or joins one, together with all ranks.

    Args:
        cpu: compute on the CPU even if there is an accelerator.
        timeout: how long a collective may wait; torch's default if ``None``.
        backend: of ``torch.distributed``; chosen by the device if ``None``.
        init_method: the rendezvous URL; the address set by the launcher if ``None``.
        anew: join a new group, together with all ranks, if an error has aborted the current one.
        find_device: returns from the environment the device of a process that has all of them, None
            where each rank has one of torch's.

    Raises:
        ValueError: the backend or the ``init_method`` is unknown or cannot serve the device.
        RuntimeError: the launcher's variables are incomplete, there are more processes than
            devices, or this process already uses another device or backend.

    Warns:
        UserWarning: the process group exists already, with another ``timeout`` or
            ``init_method``.
    """
    global _current, _group
    options = GroupOptions(backend, init_method, timeout)
    if _current is not None and not _has_joined_group():
        cpu = cpu or _current.device.type == "cpu"  # the device belongs to the process
        _forget_group()
    if anew and group_is_aborted():
        _rejoin(options)
    if _current is None:
        grouped = dist.is_available() and dist.is_initialized()
        _current = _detect(cpu, options, os.environ, find_device)
        if grouped:
            _check_group(_current, options)
    elif cpu and _current.device.type != "cpu":
        raise RuntimeError(
            f"cpu=True was asked for, but this process already computes on {_current.device}. "
            "The device belongs to the process: pass cpu=True to the first Accelerator or "
            "PartialState, or start the script with `accel launch --cpu`."
        )
    else:
        _check_group(_current, options)
    if _current.backend is not None and dist.is_initialized():
        # store() numbers the default groups of this process as it first sees them, and the number
        # is part of the store's prefix. All ranks resolve their topology, but not all of them may
        # need the store later, so it is called here to keep the numbers equal on all ranks.
        store, outlives = collectives.store(), store_outlives("env://", os.environ)
        rank, world = _current.rank, _current.world_size
        if world > 1:
            show_warnings_once(rank, store, outlives)
        collectives.expect_group(world)
        collectives.explains_with(explain)
        # Before the control group, which is made by a collective: a rank that hangs there is named.
        if world > 1 and current_heartbeat() is None:  # the script has made the group
            seconds = collectives.group_timeout().total_seconds()
            watch = watch_ranks(store, rank, world, timeout=seconds, serves_store=not outlives)
            watch.follow_group()
        if collectives.join_control_group():
            _leave_group_at_exit()
    register_daemon_thread()
    install_excepthook()
    group = collectives.default_group()
    _group = None if group is None else ref(group)
    return _current


def _has_joined_group() -> bool:
    """Return whether the default group, or its absence, is what the topology describes."""
    now = collectives.default_group()
    return now is None if _group is None else now is not None and _group() is now


def _forget_group() -> None:
    """Reset the topology, because its group is destroyed, or is another one now."""
    global _current, _owns_group, _joined_with, _copies
    _current, _owns_group, _joined_with, _copies = None, False, None, None
    stop_heartbeat()
    collectives.expect_group(1)


def _check_group(topology: Topology, options: GroupOptions) -> None:
    """Refuse or warn of options that come too late, because the process group exists already."""
    if topology.backend is None:
        return
    if options.backend and backend_for(topology.device, options.backend) != backend_for(
        topology.device, topology.backend
    ):
        raise RuntimeError(
            f"backend={options.backend!r} was asked for, but the process group already uses "
            f"{topology.backend!r}. It belongs to the process: give backend= to the first "
            "Accelerator or PartialState, or call destroy_process_group() before."
        )
    for option in ("timeout", "init_method"):
        wanted, has = getattr(options, option), getattr(_joined_with, option, None)
        if wanted is not None and wanted != has:
            warn(
                f"{option}={wanted} has no effect: the process group is there already"
                + (f", with {option}={has}. " if has is not None else ". ")
                + "Give it to the first Accelerator or PartialState.",
            )


def _detect(
    cpu: bool,
    options: GroupOptions,
    env: Mapping[str, str],
    find_device: Callable[[Mapping[str, str]], torch.device | None] | None = None,
) -> Topology:
    device = None if cpu or find_device is None else find_device(env)
    if device is not None:
        return Topology(device)
    joined = _group_ranks(env, cpu=cpu)
    if joined is not None:
        backend = str(dist.get_backend_config())
        device = pick_device(cpu, joined.local_rank, can_share=_can_share(backend))
        return Topology(device, *joined, backend=dist.get_backend())
    rank, world, local_rank, local_world = _ranks_from(env)
    if world == 1 and not env.get("LOCAL_RANK"):
        device = pick_device(cpu, None)
    else:
        device = pick_device(cpu, local_rank, can_share=_can_share(options.backend))
    joined_backend = _join(device, rank, world, options, env) if world > 1 else None
    return Topology(device, rank, world, local_rank, local_world, joined_backend)


def _can_share(backend: str | None) -> bool:
    """Return whether several processes may compute on one device: NCCL refuses it."""
    kind = own_accelerator()
    return bool(kind is not None and backend and backend_for(kind, backend) == "gloo")


def _join(
    device: torch.device, rank: int, world: int, options: GroupOptions, env: Mapping[str, str]
) -> str:
    """Join the group, and destroy it at exit at the latest."""
    global _owns_group, _joined_with
    backend = join_group(device, rank, world, options, env)
    _owns_group, _joined_with = True, options
    _leave_group_at_exit()
    return backend


@functools.cache  # once a process
def _leave_group_at_exit() -> None:
    atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    end_daemon_threads()  # first, as they use the group
    uncaught = getattr(sys, "last_value", None) is not None
    if uncaught and _computes_on_device():
        # `destroy_process_group` may flush what is queued on the device, and so wait for ranks that
        # wait for this one; the launcher ends those once this process is gone.
        stop_heartbeat()
        abort_devices()
        return
    destroy_topology()


def _computes_on_device() -> bool:
    """Return whether the group that was joined here has a backend such as NCCL."""
    group = collectives.default_group() if _owns_group and _has_joined_group() else None
    return group is not None and collectives.has_device_backend(group)


def _rejoin(asked: GroupOptions) -> None:
    """Replace the group that an error has aborted by a new one, together with all ranks."""
    global _joined_with
    if not _owns_group or _current is None or _current.backend is None:
        raise RuntimeError(
            "the process group that the script made was broken by the error that ended a run: call "
            "destroy_process_group() and init_process_group() on all processes, or let them end."
        )
    before = _joined_with or GroupOptions()
    _joined_with = replace(before, timeout=asked.timeout or before.timeout)
    rank, world = _current.rank, _current.world_size
    store = leave_aborted_group(_joined_with.timeout)
    connect(_current.backend, store, rank, world, _joined_with.timeout, os.environ)


def is_initialized() -> bool:
    """Return True once an Accelerator or a state handle has resolved the topology.

    Example:
        >>> from accel_callbacks import PartialState
        >>> from accel_callbacks.distributed.topology import destroy_topology, is_initialized
        >>> destroy_topology()
        >>> is_initialized()
        False
        >>> state = PartialState(cpu=True)
        >>> is_initialized()
        True
    """
    return _current is not None


def is_current(topology: Topology) -> bool:
    """Return whether a topology is that of now: the process group has not ended since.

    Example:
        >>> from accel_callbacks.distributed.topology import (
        ...     destroy_topology,
        ...     is_current,
        ...     resolve_topology,
        ... )
        >>> topology = resolve_topology(cpu=True)
        >>> is_current(topology)
        True
        >>> destroy_topology()
        >>> is_current(topology)
        False
    """
    return topology is _current


def destroy_topology() -> None:
    """Destroy the process group (if it was joined here) and reset the topology.

    Unreferenced models are collected first: a gloo worker thread that frees one of their tensors
    while the interpreter finalizes aborts the process.

    Example:
        >>> from accel_callbacks.distributed.topology import destroy_topology, resolve_topology
        >>> _ = resolve_topology(cpu=True)
        >>> destroy_topology()
    """
    joined = _owns_group and dist.is_initialized() and _has_joined_group()
    show_warnings_plainly()
    _forget_group()
    if joined:
        # In this order: a background save still uses its own group, and the reducers of models
        # (in reference cycles, so only gc frees them) must go before the group they belong to.
        wait_for_exempt_groups()
        gc.collect()
        dist.destroy_process_group()
    collectives.leave_control_group()  # beside a group of the script's, which stays


class Ranks(NamedTuple):
    """The place of this process among all of the run, and among those of its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def process_rank() -> Ranks:
    """Return the ranks of this process.

    They are read from the topology, else from a process group that the script has made, else from
    the environment. So decorators work at import time, before any Accelerator exists.
    """
    topology = _current
    if topology is None:
        return _group_ranks(os.environ) or _ranks_from(os.environ)
    return Ranks(topology.rank, topology.world_size, topology.local_rank, topology.local_world_size)


def note_copies(copies: int) -> None:
    """Note how many neighboring ranks read the same data, for seeds; the latest value counts."""
    global _copies
    _copies = copies


def process_data_rank() -> int:
    """Return the rank of this process among those that read different data.

    Before any Accelerator exists, the launcher's sizes of the mesh count.
    """
    copies = _copies
    if copies is None:
        names = [f"ACCEL_PARALLELISM_{axis}_SIZE" for axis in ("PP", "CP", "SP", "TP")]
        if os.environ.get("ACCEL_DISTRIBUTED_TYPE") == "MEGATRON_LM":
            degrees = ("TP_DEGREE", "PP_DEGREE", "CONTEXT_PARALLEL_SIZE")
            names = [f"ACCEL_MEGATRON_LM_{degree}" for degree in degrees]
        copies = math.prod(max(_number(os.environ, name, 1), 1) for name in names)
    return process_rank()[0] // copies


def _group_ranks(env: Mapping[str, str], cpu: bool = False) -> Ranks | None:
    """Return the ranks of the existing process group, None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    on_cpu = cpu or own_accelerator() is None
    count = 0 if on_cpu else torch.accelerator.device_count()
    index = next((name for name in ("LOCAL_RANK", *_TASK_INDEX) if env.get(name)), None)
    if index is not None:
        local_rank = _number(env, index, rank)
    else:
        # Device 0 is also the current one of a script that has not chosen any.
        local_rank = current_device_index() or rank % count if count else rank
    local_world = min(world, count) if count else world
    return Ranks(rank, world, local_rank, _number(env, "LOCAL_WORLD_SIZE", local_world))


def _ranks_from(env: Mapping[str, str]) -> Ranks:
    world = _number(env, "WORLD_SIZE", 1)
    if world > 1 and not env.get("RANK"):
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
    return Ranks(rank, world, local_rank, _number(env, "LOCAL_WORLD_SIZE", world))


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    """Read an integer variable of the launcher; an empty one is not given."""
    text = env.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(
            f"{name}={text!r} is no whole number: start the script with `accel launch` or "
            f"`torchrun`, or unset {name} for a single process."
        ) from None


def own_accelerator() -> torch.device | None:
    """Return the type of this machine's accelerator, None without one.

    ``torch.accelerator.current_accelerator()`` alone returns what torch was built for, even where
    the machine has no such device.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def pick_device(cpu: bool, local_rank: int | None, *, can_share: bool = False) -> torch.device:
    """Return the device of a local rank, and make it torch's current device.

    Args:
        cpu: use the CPU even where there is an accelerator.
        local_rank: index among the processes of this machine, and so the index of its device;
            ``None`` for a process alone, which keeps the device that the script has made current.
        can_share: where there are fewer devices than processes, several use the same one.

    Raises:
        RuntimeError: this machine has fewer devices, and they cannot be shared.
    """
    kind = None if cpu else own_accelerator()
    if kind is None:
        return torch.device("cpu")
    if local_rank is None:
        local_rank = current_device_index()
    count = torch.accelerator.device_count()
    if count == 1 and _has_one_device_per_task(local_rank):
        local_rank = 0
    if local_rank >= count and can_share:
        local_rank %= count
    if local_rank >= count:
        raise RuntimeError(
            f"local rank {local_rank} has no device: this machine shows {count}. Start at most "
            f"{count} processes here, pass --cpu to `accel launch`, or let processes share a "
            'device with backend="gloo". If each process sees its own device only, set LOCAL_RANK '
            "to 0 for each."
        )
    device = torch.device(kind.type, local_rank)
    select_device(device)
    return device


def _has_one_device_per_task(local_rank: int) -> bool:
    """Return whether a scheduler made one device visible to each task (`srun --gpus-per-task=1`).

    Then every task sees its own device as index 0. torchrun started as one task is not that case:
    the task index is the launcher's, 0, and its workers must not share the one visible device.
    """
    return any(os.environ.get(name) == str(local_rank) for name in _TASK_INDEX)


def select_device(device: torch.device) -> None:
    """Make a device torch's current one in this thread; do nothing for the CPU."""
    if device.type not in ("cpu", "xla"):
        # torch 2.6 has only the older name.
        select = getattr(torch.accelerator, "set_device_index", None)
        (select or torch.accelerator.set_device_idx)(device.index or 0)


def current_device_index() -> int:
    """Return the index of torch's current accelerator, 0 unless the script has set another."""
    # torch 2.6 has only the older name.
    current = getattr(torch.accelerator, "current_device_index", None)
    return int((current or torch.accelerator.current_device_idx)())
