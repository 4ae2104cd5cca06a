"""Collectives over picklable objects, flags, the barrier, and the checks before each of them."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from accel_callbacks.collectives.group import (
    control_group,
    explained,
    group_for,
    next_number,
    on_backend,
    rank,
    refuse_in_turn,
    run_before,
    serves_cpu,
    source_of,
    store,
    world_size,
)
from accel_callbacks.collectives.nested import (
    is_array,
    is_container,
    is_number,
    is_tensor,
    leaves,
    type_of,
    values_in,
)
from accel_callbacks.errors import DistributedOperationException

__all__ = [
    "Call",
    "Posted",
    "all_objects",
    "any_process",
    "barrier",
    "begin",
    "broadcast_object",
    "broadcast_object_list",
    "contents",
    "differences",
    "exchange",
    "gather_object",
    "send_object",
    "whole",
]

_SHORT = 1024  # bytes of the first message
_SIZE = 8  # bytes of it that hold the size of the object
_ROOM = _SHORT - _SIZE


class _Unsendable(NamedTuple):
    """Sent in place of an object that cannot be pickled, so that no rank waits for it."""

    reason: str


def exchange(value: T, group: Any = None) -> list[T]:
    """Collective: return the objects that all ranks passed, in rank order.

    Args:
        value: a picklable object.
        group: of all ranks; default: the control group.

    Raises:
        TypeError: on all ranks, if an object cannot be pickled.
        Exception: on a rank that cannot import the class of an object of another rank.
    """
    if group is None and world_size() == 1:
        return [value]
    content, error = _pickle_value(value)
    parts = [pickle.loads(part) for part in _gather(content, group or control_group())]
    for index, part in enumerate(parts):
        if isinstance(part, _Unsendable):
            raise TypeError(_complaint(index, part)) from (error if index == rank() else None)
    return parts


def send_object(value: T, source: int, group: Any = None) -> T:
    """Collective: return the object that rank ``source`` passed; raise as :func:`exchange`."""
    if group is None and world_size() == 1:
        return value
    content, error = _pickle_value(value) if rank() == source else (b"", None)
    sent = pickle.loads(_broadcast(content, source, group or control_group()))
    if isinstance(sent, _Unsendable):
        raise TypeError(_complaint(source, sent)) from error
    return cast(T, sent)


def _pickle_value(value: Any) -> tuple[bytes, Exception | None]:
    try:
        return pickle.dumps(value), None
    except Exception as error:
        # The other ranks come to the collective; it is completed with the reason.
        return pickle.dumps(_Unsendable(f"{type(error).__name__}: {error}")), error


def _complaint(index: int, part: _Unsendable) -> str:
    return f"process {index} passed an object that cannot be sent, {part.reason}."


def _gather(content: bytes, group: Any) -> list[bytes]:
    """Collective: return the bytes of all ranks."""
    count = dist.get_world_size(group)
    if serves_cpu(group or dist.group.WORLD):
        table = torch.empty(count, _SHORT, dtype=torch.uint8, device="cpu")
        messages = list(table.unbind()) if rank() == 0 else None
        dist.gather(_message(content), messages, dst=0, group=group)
        dist.broadcast(table, src=0, group=group)
        sizes, starts = zip(*map(_open_message, table.unbind()), strict=True)
        if max(sizes) <= _ROOM:
            return list(starts)
    held = [b""] * count
    dist.all_gather_object(held, content, group=group)
    return held


def _broadcast(content: bytes, source: int, group: Any) -> bytes:
    """Collective: return the bytes of rank ``source``."""
    if serves_cpu(group or dist.group.WORLD):
        message = _message(content)
        dist.broadcast(message, src=source, group=group)
        size, start = _open_message(message)
        if size <= _ROOM:
            return start
    box = [content]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def _message(content: bytes) -> torch.Tensor:
    """Return the size of the content, and its start, as a message of a fixed size."""
    start = len(content).to_bytes(_SIZE, "little") + content[:_ROOM]
    return torch.frombuffer(bytearray(start.ljust(_SHORT, b"\0")), dtype=torch.uint8)


def _open_message(message: torch.Tensor) -> tuple[int, bytes]:
    """Return the size of the content, and its start, of a message."""
    raw = message.numpy().tobytes()
    size = int.from_bytes(raw[:_SIZE], "little")
    return size, raw[_SIZE : _SIZE + size]


T = TypeVar("T")


@explained("wait_for_everyone")
def barrier(*, debug: bool | None = None) -> None:
    """Block until all ranks have reached this point."""
    begin("wait_for_everyone", debug)
    if world_size() > 1:
        dist.barrier(group=control_group())


def all_objects(value: T, *, operation: str = "all_objects", debug: bool | None = None) -> list[T]:
    """Return the objects of all ranks in rank order; ``operation`` is shown in errors."""
    begin(operation, debug)
    with explained(operation):
        return exchange(value)


@explained("any_process")
def any_process(flag: bool) -> bool:
    """Return True on all ranks if the flag is True on one."""
    begin("any_process")
    if world_size() == 1:
        return flag
    votes = on_backend(torch.tensor([int(flag)], dtype=torch.int32, device="cpu"))
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=group_for(votes))
    return bool(votes.item())


def gather_object(object: Any, *, debug: bool | None = None) -> list[Any]:
    """Gather the objects of all processes into one list, in rank order.

    Processes that share a model, and have read the same batch, are not told apart:
    ``Accelerator.gather_for_metrics`` does.

    Args:
        object: a picklable object. Lists and tuples are joined into one list; anything else (a
            dict, a string, a number) is one entry for each process.
        debug: first compare the calls of all processes; read from ``ACCEL_DEBUG`` if ``None``.

    Raises:
        TypeError: on all processes, if an object cannot be pickled.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

    Example:
        >>> from accel_callbacks import gather_object
        >>> gather_object(["a", "b"])
        ['a', 'b']
        >>> gather_object({"rank": 0})
        [{'rank': 0}]
    """
    parts = all_objects(object, operation="gather_object", debug=debug)
    if all(isinstance(part, (list, tuple)) for part in parts):
        return list(chain.from_iterable(parts))
    return parts


@explained("broadcast_object")
def broadcast_object(value: T, from_process: int = 0, *, debug: bool | None = None) -> T:
    """Return the object that ``from_process`` passed, on every process.

    Args:
        value: the picklable object to send; it is ignored on the other processes.
        from_process: the rank that sends.
        debug: as for :func:`gather_object`.

    Raises:
        ValueError: the rank does not exist.
        TypeError: on all processes, if the object cannot be pickled.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

    Example:
        >>> from accel_callbacks import broadcast_object
        >>> broadcast_object("run-7")
        'run-7'
    """
    source = source_of(from_process)
    begin("broadcast_object", debug, from_process=from_process)
    return send_object(value, source)


@explained("broadcast_object_list")
def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, debug: bool | None = None
) -> list[Any]:
    """Replace the items of a list by those of ``from_process`` in place, and return it.

    Args:
        object_list: a list of picklable objects; its length may differ on the other processes.
        from_process: the rank that sends.
        debug: as for :func:`gather_object`.

    Raises:
        ValueError: the rank does not exist.
        TypeError: it is no list; or, on all processes, an object cannot be pickled.
        DistributedOperationException: in debug mode, if the calls of the processes differ.

    Example:
        >>> from accel_callbacks import broadcast_object_list
        >>> broadcast_object_list([{"seed": 7}, "name"])
        [{'seed': 7}, 'name']
    """
    source = source_of(from_process)
    begin("broadcast_object_list", debug, from_process=from_process)
    sent = send_object(object_list, source)
    # Checked after the collective: a rank that raised before it would leave the others waiting.
    if not isinstance(object_list, list):
        raise TypeError(
            f"object_list is a {type(object_list).__name__} and cannot be filled: pass a list, or "
            "use broadcast_object."
        )
    object_list[:] = sent
    return object_list


# A value of each rank, compared without waiting for any of them.


class Posted:
    """The values that the ranks post under one name, each when it gets there.

    No rank waits, so that a check may be made where only some ranks come. Ranks that train in step
    have posted by the time of their next step.

    Args:
        name: of what is compared, the same on all ranks; the n-th of a name on each rank is
            compared with the n-th of the others.
        value: of this rank.

    Example:
        >>> import torch.distributed as dist
        >>> from accel_callbacks.collectives.objects import Posted
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> Posted("epoch", "3").values()
        ['3']
        >>> dist.destroy_process_group()
    """

    def __init__(self, name: str, value: str) -> None:
        # Numbered, as this process posts in the order of the others.
        prefix = f"posted/{name}/{next_number(f'posted {name}')}"
        self._keys = [f"{prefix}/{index}" for index in range(world_size())]
        with suppress(dist.DistError):  # a check ends no training
            store().set(self._keys[rank()], value)

    def values(self) -> list[str] | None:
        """Return the values in rank order, ``None`` until all ranks have posted."""
        values: list[str | None] = [None]
        with suppress(dist.DistError):
            values = store().read(self._keys)
        present = [value for value in values if value is not None]
        return present if len(present) == len(values) else None


# --- checks before a collective; in debug mode the ranks compare what they are about to do -------

_SHOWN = 8  # entries of one process in a table


class Call(NamedTuple):
    """A collective that one rank is about to start; ``place`` is shown, but not compared."""

    text: str
    contents: tuple[str, ...] = ()
    place: str = ""


def begin(
    operation: str,
    debug: bool | None = None,
    holds: Callable[[], Sequence[str]] = tuple,
    **arguments: Any,
) -> None:
    """Refuse a collective that would hang; in debug mode, compare the calls of all ranks.

    Args:
        operation: the name of the collective.
        debug: compare the calls; read from ``ACCEL_DEBUG`` if ``None``.
        holds: returns what must be equal on all ranks, such as :func:`contents`.
        **arguments: of the collective, equal on all ranks.

    Raises:
        DistributedOperationException: on all ranks, if their calls differ.
        RuntimeError: in a block in which the ranks take turns; or another rank still trains.
    """
    if world_size() == 1:
        return
    refuse_in_turn(operation)
    run_before(operation)
    if not (_debug_from_environment() if debug is None else debug):
        return
    text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    calls = exchange(Call(f"{operation}({text})", tuple(holds()), _place()))
    if len({call[:2] for call in calls}) > 1:
        raise DistributedOperationException(
            differences(calls) + "\nMake the same call on all processes, with tensors alike in "
            "structure, type, shape and kind of device."
        )


def _debug_from_environment() -> bool:
    text = os.environ.get("ACCEL_DEBUG")
    if text is None:
        return False
    from accel_callbacks.options import resolve_config

    return resolve_config({}, {"ACCEL_DEBUG": text}).debug


def contents(data: Any, text_of: Callable[[torch.Tensor], str], path: str = "") -> list[str]:
    """Return one line for each leaf of a nested structure: its path, and its text or type."""

    def is_held(leaf: Any) -> bool:
        return is_tensor(leaf) or (leaf is not None and not is_container(leaf))

    def text(leaf: Any) -> str:
        if is_tensor(leaf):
            return text_of(leaf)
        if is_array(leaf):
            return f"array of {text_of(*values_in(leaf))}"
        return "number" if is_number(leaf) else type_of(leaf)

    compared = leaves(data, is_held, by_key=True, path=path)
    return [f"{path or 'value'}: {text(value)}" for path, value in compared]


def whole(tensor: torch.Tensor, shape: Sequence[object] | None = None) -> str:
    """Return dtype, shape and device type of a tensor as text; ``shape`` replaces its own."""
    sizes = ", ".join(map(str, tensor.shape if shape is None else shape))
    dense = tensor.layout is torch.strided and not tensor.is_nested
    kind = "" if dense else f"{str(tensor.layout).removeprefix('torch.')} "
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}{dtype} ({sizes}) on {tensor.device.type}"


def differences(calls: Sequence[Call]) -> str:
    """Return a table of the calls of all ranks, with one row for equal calls."""
    ranks: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for index, call in enumerate(calls):
        ranks.setdefault(call[:2], []).append(index)
    usual = max(ranks.values(), key=len)  # the first one in a tie
    odd = [index for index in range(len(calls)) if index not in usual]
    common = set.intersection(*(set(call.contents) for call in calls))
    verb = "differ" if len(odd) > 1 else "differs"
    rows = [f"{_processes(odd)} {verb} from {_processes(usual)}, so nothing was sent:"]
    for (text, held), callers in ranks.items():
        place = calls[callers[0]].place
        rows.append(f"  {_processes(callers)}: {text}" + (f" at {place}" if place else ""))
        differing = [entry for entry in held if entry not in common]
        rows += [f"      {entry}" for entry in differing[:_SHOWN]]
        rows += [f"      and {len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else []
    return "\n".join(rows)


def _processes(ranks: Sequence[int]) -> str:
    """Return ``process 0``, or ``processes 0, 2-5``."""
    spans: list[list[int]] = []
    for index in ranks:
        if spans and index == spans[-1][-1] + 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    text = ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)
    return f"process{'es' if len(ranks) > 1 else ''} {text}"


def _place() -> str:
    """Return file and line of the call, outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in ("accel_callbacks", "contextlib", "functools"):
            break
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
