"""The tensors of a model that weights are loaded into: by name, tied ones known as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from checkpoint_io.errors import StateMismatchError
from checkpoint_io.sharding.dtensor import is_dtensor

WantedDtype = torch.dtype | Callable[[str], "torch.dtype | None"] | None
Home = tuple[dict[str, Any], str]


class ModelTargets:
    """Parameters and persistent buffers of a model, under the names of its state dict.

    Args:
        model: a module; the wrappers of DDP and `torch.compile` are looked through.

    Attributes:
        changed: whether `prepare` has taken the old values of a tensor away.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = _bare(model)
        state = self._model.state_dict(keep_vars=True)
        self.tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        self.changed = False
        self._own: set[int] | None = None
        by_mark: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            by_mark.setdefault(id(tensor), []).append(name)
        self._names = {name: names for names in by_mark.values() for name in names}

    def is_own(self, name: str) -> bool:
        """Say whether this is the model's memory, and not a copy that a hook of it has made."""
        if self._own is None:
            self._own = {id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        return id(self.tensors[name]) in self._own

    def names_of(self, name: str) -> list[str]:
        """Return all names of the tensor that has this one, in the model's order."""
        return self._names[name]

    def prepare(
        self, names: Iterable[str], dtype: WantedDtype, device: torch.device | None
    ) -> None:
        """Give tensors the dtype and device that they are to have, without their old values."""
        changes = []
        for name in names:
            tensor = self.tensors[name]
            wanted = dtype(name) if callable(dtype) else dtype
            kind = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
            place = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
            if kind != tensor.dtype or place != tensor.device:
                _refuse_to_move(tensor, name, place)
                changes.append((name, kind, place))
        homes = _homes(self._model) if changes else {}
        for name, kind, place in changes:
            blank = torch.empty_like(self.tensors[name].detach(), dtype=kind, device=place)
            self.changed = True
            self._replace(name, blank, homes)

    def _replace(self, name: str, blank: torch.Tensor, homes: Mapping[int, Sequence[Home]]) -> None:
        """Put new memory behind all names of a tensor; a parameter stays the same object."""
        tensor = self.tensors[name]
        if isinstance(tensor, torch.nn.Parameter) and not tensor.is_meta:
            tensor.data = blank
            if tensor.grad is not None:
                tensor.grad = None  # of another dtype or device than its parameter now
            return
        fresh: torch.Tensor = blank
        if isinstance(tensor, torch.nn.Parameter):
            fresh = torch.nn.Parameter(blank, requires_grad=tensor.requires_grad)
        for place, key in homes[id(tensor)]:
            place[key] = fresh
        for other in self.names_of(name):
            self.tensors[other] = fresh


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """Look through wrappers that put a prefix before every name."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def _refuse_to_move(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """Refuse to give a DTensor memory on another device."""
    if is_dtensor(tensor) and (tensor.is_meta or device != tensor.device):
        raise StateMismatchError(
            f"{name} is a DTensor on {tensor.device}, which loading cannot move to {device}: "
            "call model.to_empty(device=...) first"
        )


def _homes(model: torch.nn.Module) -> dict[int, list[Home]]:
    """Find every place in the modules that holds a tensor."""
    found: dict[int, list[Home]] = {}
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            for key, value in place.items():
                if value is not None:
                    found.setdefault(id(value), []).append((place, key))
    return found
