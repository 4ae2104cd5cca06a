"""Distribute the weights of a model that is about to be sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.models.absent_weights import (
    AbsentWeights,
    Init,
    named_tensors,
)

__all__ = ["InitialWeights", "whole_parameters_freed"]

_BLOCK = 64 << 20  # bytes that are sent at a time
_SHOWN = 5
_WHERE = "prepare"


class InitialWeights:
    """The initial values of a model that is about to be sharded.

    Collective. Ranks that all have the same values keep their parts of them. What is on the meta
    device on all ranks gets memory, and values later. What only rank 0 has, or has with other
    values than another rank, rank 0 sends, block by block, so that no rank holds more of it than
    its part and a block.

    Args:
        model: the model as the user built it.
        device: where its parts will be.
        sync: send what differs between ranks; else each keeps its own.
        param_init_fn: initializes one module, see ``initialize_weights``.

    Raises:
        ValueError: the ranks have different models, or rank 0 lacks what another has.
        RemoteError: another rank failed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        *,
        sync: bool = True,
        param_init_fn: Init | None = None,
    ) -> None:
        self._model, self._device, self._param_init_fn = model, device, param_init_fn
        tensors = named_tensors(model)
        self._sent, self._lacks = _differences(model, tensors, sync)
        # Sharding replaces the parameters; until they are sent, rank 0 needs the whole ones.
        first = collectives.rank() == 0
        self._whole = {name: tensors[name].detach() for name in self._sent} if first else {}

    def fill(self) -> None:
        """Allocate memory for meta tensors, and receive the tensors that rank 0 sends."""
        absent = None
        if any(tensor.is_meta for tensor in named_tensors(self._model).values()):
            absent = AbsentWeights(self._model, self._device, self._param_init_fn)
        targets = named_tensors(self._model)
        for name in self._sent:
            _send(self._whole.pop(name, None), targets[name])
        if absent is not None and not self._lacks:
            absent.dismiss()


@contextmanager
def whole_parameters_freed(*modules: torch.nn.Module) -> Iterator[None]:
    """Context manager: free the memory of parameters that are replaced in modules.

    An optimizer, or the user, may hold them.

    Example:
        >>> import torch
        >>> from accel_callbacks.models.initial_weights import whole_parameters_freed
        >>> layer = torch.nn.Linear(2, 2)
        >>> held = layer.weight
        >>> with whole_parameters_freed(layer):
        ...     layer.weight = torch.nn.Parameter(torch.zeros(1, 2))
        >>> held.numel()
        0
    """
    before = [parameter for module in modules for parameter in module.parameters()]
    yield
    remaining = {id(parameter) for module in modules for parameter in module.parameters()}
    for parameter in before:
        if id(parameter) not in remaining and not parameter.is_meta:
            parameter.data = parameter.data.new_empty(0)


class _Report(NamedTuple):
    """A model on one rank: a digest of names and shapes, meta tensors, a digest of values."""

    structure: str
    meta: list[str]
    values: str


def _differences(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], sync: bool
) -> tuple[list[str], bool]:
    """Return the names of the tensors that rank 0 sends, and whether it lacks others."""
    if collectives.world_size() == 1:
        return [], any(tensor.is_meta for tensor in tensors.values())
    with shared_failure(_WHERE):
        structure = {
            name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()
        }
        meta = [name for name, tensor in tensors.items() if tensor.is_meta]
        sums = _sums(tensors) if sync else {}
        report = _Report(_digest(structure), meta, _digest(sums))
    reports = collectives.all_objects(report, operation=_WHERE)
    first = reports[0]
    if any(report.structure != first.structure for report in reports):
        _refuse_other_models(model, structure)
    absent = {name for report in reports for name in report.meta}
    lost = [name for name in first.meta if any(name not in report.meta for report in reports)]
    if lost:
        listed = ", ".join(lost[:_SHOWN])
        raise ValueError(
            f"{type(model).__name__}: rank 0 has {listed} on the meta device, and another rank has "
            "values: build the model alike on all ranks, or with values on rank 0."
        )
    sent = absent - set(first.meta)
    if any(report.values != first.values for report in reports):
        all_sums = collectives.all_objects(sums, operation=_WHERE)
        sent |= {
            name
            for name, value in all_sums[0].items()
            if any(other.get(name, value) != value for other in all_sums)
        }
    return [name for name in tensors if name in sent], bool(first.meta)


def _sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a fingerprint of each tensor, the same for the same values on devices of one kind."""
    marks = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            dtype = torch.float64 if values.is_floating_point() else torch.int64
            if values.is_floating_point() and values.element_size() == 1:  # no sums in float8
                values = values.view(torch.uint8)
            flat = values.detach().reshape(-1)
            # Parts of it too: the same values in another order have the same sum.
            parts = (flat, flat[::2], flat[: len(flat) // 2])
            marks[name] = repr(torch.stack([part.sum(dtype=dtype) for part in parts]).tolist())
    return marks


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def _refuse_other_models(model: torch.nn.Module, structure: Mapping[str, Any]) -> None:
    """Raise on all ranks, and name the first differences to rank 0."""
    every = collectives.all_objects(dict(structure), operation=_WHERE)
    for rank, other in enumerate(every):
        names = [name for name in {**every[0], **other} if every[0].get(name) != other.get(name)]
        if names:
            shown = "; ".join(
                f"{name} is {_shape(every[0], name)} on rank 0, {_shape(other, name)} on {rank}"
                for name in names[:_SHOWN]
            )
            raise ValueError(
                f"{type(model).__name__} differs between ranks: {shown}. Build the same model on "
                "all ranks."
            )


def _shape(structure: Mapping[str, Any], name: str) -> str:
    return f"{list(structure[name][0])}" if name in structure else "absent"


def _send(whole: torch.Tensor | None, target: torch.Tensor) -> None:
    """Broadcast a tensor of rank 0 into the shards of all ranks."""
    for first, last, shape in _blocks(target):
        if whole is None:
            block = torch.empty(shape, dtype=target.dtype, device=target.device)
        else:
            rows = whole[first:last] if whole.dim() else whole
            block = rows.to(target.device, target.dtype)
        collectives.copy_part(target, collectives.broadcast(block), first, last)


def _blocks(target: torch.Tensor) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the rows of a tensor in blocks of limited size, as first row, end and shape."""
    if not target.dim():
        yield 0, 1, ()
        return
    rows, rest = target.shape[0], tuple(target.shape[1:])
    width = max(1, torch.Size(rest).numel() * target.element_size())
    step = max(1, _BLOCK // width)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        yield first, last, (last - first, *rest)
