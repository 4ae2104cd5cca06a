"""The default process group: its ranks and store, and turns."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
import torch.distributed as dist

from accel_callbacks.collectives.store import BoundedStore

__all__ = [
    "adopt_store",
    "before_collectives",
    "control_group",
    "current_turn",
    "default_group",
    "expect_group",
    "explained",
    "explains_with",
    "group_for",
    "group_timeout",
    "has_device_backend",
    "has_peers",
    "join_control_group",
    "leave_control_group",
    "next_number",
    "on_backend",
    "rank",
    "refuse_in_turn",
    "run_before",
    "serves_cpu",
    "source_of",
    "store",
    "turn",
    "world_size",
]

# The name of the block in which the ranks take turns, if this thread is in one.
_TURN: ContextVar[str | None] = ContextVar("accel_callbacks_turn", default=None)
# The store of each default group that this process has had. Global, as the default group is.
_stores: WeakKeyDictionary[Any, BoundedStore] = WeakKeyDictionary()
_count = itertools.count()
# What the ranks of each default group have numbered alike.
_numbers: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
# The gloo group beside each default group that serves no tensors of the CPU.
_control: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# Finds the cause of a failed collective: this room does not know the one that watches the ranks.
_explain: Callable[[BaseException, str], BaseException] | None = None
# Called with the name of each collective that begins: by what they check, so that the newest loop
# and strategy count. Weak, as they belong to their owners.
_before: dict[str, WeakMethod[Any]] = {}
# Ranks of the group that this process has joined, 1 without one. Global, as the default group is.
_expected = 1


def expect_group(ranks: int) -> None:
    """Set the number of ranks without which collectives are refused; 1 to need no group.

    A script may destroy the group that an Accelerator uses. Each rank would go on as if it were
    alone, gather its own values only and write over the files of the others.
    """
    global _expected
    _expected = ranks


def world_size() -> int:
    """Return the number of ranks in the default group, 1 without one.

    Raises:
        RuntimeError: the script has destroyed the group that an Accelerator of this process joined.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    if _expected > 1:
        raise RuntimeError(
            f"the process group of {_expected} ranks was destroyed "
            "(torch.distributed.destroy_process_group), and the Accelerator that joined it cannot "
            "go on: make a new Accelerator, and prepare again, on all processes."
        )
    return 1


def default_group() -> Any:
    """Return the default group, None without one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def has_peers() -> bool:
    """Return whether there is a default group, of several ranks; never raise."""
    return dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return the rank of this process in the default group, 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def store() -> BoundedStore:
    """Return a key-value store of the default group, with a prefix of its own.

    The store of a launcher outlives the group, and without the prefix a later group would read
    keys that an earlier one has left. The prefix counts default groups in the order of their first
    call of this function, which must be the same on all ranks.
    """
    held = _stores.get(dist.group.WORLD)
    if held is None:
        place = f"accel_callbacks/group{next(_count)}"
        default = dist.distributed_c10d._get_default_store()
        held = BoundedStore(dist.distributed_c10d.PrefixStore(place, default))
        _stores[dist.group.WORLD] = held
    return held


def next_number(name: str) -> int:
    """Return how many things of a name this rank has numbered before in the default group."""
    world = default_group()
    if world is None:
        return 0
    numbers = _numbers.setdefault(world, Counter())
    numbers[name] += 1
    return numbers[name] - 1


def adopt_store(held: BoundedStore) -> None:
    """Set the store of the default group: the one over which its ranks have joined."""
    _stores[dist.group.WORLD] = held


def explains_with(explain: Callable[[BaseException, str], BaseException]) -> None:
    """Set the function that returns the error from which that of a collective follows."""
    global _explain
    _explain = explain


def before_collectives(name: str, check: WeakMethod[Any]) -> None:
    """Set the check of a name, which is called before each collective of several ranks."""
    _before[name] = check


def run_before(operation: str) -> None:
    """Run the checks that :func:`before_collectives` has set."""
    for check in _before.values():
        alive = check()
        if alive is not None:
            alive(operation)


class explained(ContextDecorator):
    """Context manager and decorator: raise what happened to a rank that broke a collective.

    Args:
        operation: the name of the collective, for the error.
    """

    __slots__ = ("_operation",)

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raise the cause from the error of the collective."""
        if isinstance(error, RuntimeError) and _explain is not None:
            cause = _explain(error, self._operation)
            if cause is not error:
                raise cause from error


def join_control_group() -> bool:
    """Collective: make a gloo group beside a default group that serves no tensors of the CPU.

    Over NCCL alone, each vote and each object would be copied to the device and back, and the host
    would wait for all work that is queued there.

    Returns:
        True if there is such a group, made now or before.
    """
    world = dist.group.WORLD
    if world is None or world in _control:
        return world is not None
    if dist.get_world_size() == 1 or serves_cpu(world):
        return False
    _control[world] = dist.new_group(backend="gloo", timeout=_timeout_of(world))
    return True


def leave_control_group() -> None:
    """Destroy the group that :func:`join_control_group` made; do nothing without one."""
    world = default_group()
    group = None if world is None else _control.pop(world, None)
    if group is not None:
        dist.destroy_process_group(group)


def control_group() -> Any:
    """Return the group for votes, flags and objects; None for the default group."""
    return _control.get(dist.group.WORLD) if _control else None


def group_for(tensor: torch.Tensor) -> Any:
    """Return the group that serves a tensor of :func:`on_backend`; None for the default group."""
    return control_group() if tensor.device.type == "cpu" else None


def serves_cpu(group: Any) -> bool:
    """Return whether a group takes tensors of the CPU."""
    return any(kind.type == "cpu" for kind in group._device_types)


def group_timeout() -> timedelta:
    """Return the timeout of collectives of the default group; torch's default if it is unknown."""
    world = dist.group.WORLD
    timeout = None if world is None else _timeout_of(world)
    return dist.constants.default_pg_timeout if timeout is None else timeout


def has_device_backend(group: Any) -> bool:
    """Return whether a group has a backend such as NCCL, whose collectives run on a device.

    gloo has none: it serves the tensors of devices too, from the host.
    """
    kinds = (kind for kind in group._device_types if kind.type != "cpu")
    return any(group._get_backend(kind).name() != "gloo" for kind in kinds)


def _timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a group, None if its backend does not tell."""
    # That of the CPU first: what the library waits for itself goes over gloo.
    for kind in sorted(group._device_types, key=lambda kind: kind.type != "cpu"):
        with suppress(Exception):  # of a backend without options
            timeout = group._get_backend(kind).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return None


def on_backend(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor to a device that the default group or :func:`control_group` serves.

    Our own groups serve the CPU and the accelerator, but a group made by the user may serve one.
    """
    if tensor.device.type == "cpu" and control_group() is not None:
        return tensor
    backend = dist.get_backend()
    if backend == "nccl" and tensor.device.type == "cpu":
        return tensor.cuda()
    return tensor.cpu() if backend == "gloo" else tensor


@contextmanager
def turn(block: str) -> Iterator[None]:
    """Context manager: mark a block that ranks run one after the other, without collectives."""
    token = _TURN.set(block)
    try:
        yield
    finally:
        _TURN.reset(token)


def current_turn() -> str | None:
    """Return the name of the :func:`turn` that this thread is in, None outside."""
    return _TURN.get()


def refuse_in_turn(operation: str) -> None:
    """Raise in a turn, where a collective would wait for ranks that wait for this one."""
    block = _TURN.get()
    if block is not None:
        raise RuntimeError(
            f"{operation} inside of {block} would wait for ever: the processes run that block one "
            "after the other. Move it out of the block."
        )


def source_of(from_process: int) -> int:
    """Return the rank to send from, if it exists."""
    if not 0 <= from_process < world_size():
        raise ValueError(
            f"from_process={from_process} is none of the {world_size()} processes; ranks begin "
            "at 0."
        )
    return from_process
