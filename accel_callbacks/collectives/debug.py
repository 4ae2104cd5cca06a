"""Checks before a collective; in debug mode the ranks compare what they are about to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from accel_callbacks.collectives.group import refuse_in_turn, run_before, world_size
from accel_callbacks.collectives.nested import (
    is_array,
    is_container,
    is_number,
    is_tensor,
    leaves,
    type_of,
    values_in,
)
from accel_callbacks.collectives.object_exchange import exchange
from accel_callbacks.errors import DistributedOperationException

__all__ = ["Call", "begin", "contents", "differences", "whole"]

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
