"""Tensors that are kept by reference, and whether they are still what they were."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from accel_callbacks import collectives

__all__ = ["KeptTensors", "own_weights"]

_SAMPLED = 16  # values of each weight that are compared


class KeptTensors:
    """Keeps tensors by reference, and tells whether they were written to since.

    In-place operations are told by the versions that torch counts. Those through
    ``parameter.data`` change no version, so a few values of each weight are compared as well.

    Example:
        >>> import torch
        >>> from accel_callbacks.addons.resilience.kept_tensors import KeptTensors
        >>> weight, kept = torch.zeros(4), KeptTensors()
        >>> kept.keep([weight], [weight])
        >>> before = kept.unchanged()
        >>> _ = weight.data.add_(1)
        >>> before, kept.unchanged()
        (True, False)
    """

    def __init__(self) -> None:
        self._marks: list[tuple[torch.Tensor, int, int]] = []
        self._weights: list[torch.Tensor] = []
        self._places: list[tuple[int, int]] = []  # of the weights: which, and where in memory
        self._views: list[torch.Tensor] = []  # the values that are compared, in the weights
        self._samples: list[torch.Tensor] = []  # copies of them

    def keep(self, tensors: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
        """Keep these tensors, in place of those before.

        Args:
            tensors: all of them.
            weights: those of which values are compared too.
        """
        self._marks = [(tensor, tensor._version, _address(tensor)) for tensor in tensors]
        local = [_local_tensor(weight) for weight in weights]
        places = [(id(weight), _address(weight)) for weight in local]
        # The views are made once, as this may be called after each step.
        if places != self._places:
            self._places, self._weights = places, local
            self._views = list(map(_sample, local))
            self._samples = [view.clone() for view in self._views]
        elif self._views:
            torch._foreach_copy_(self._samples, self._views)

    def unchanged(self) -> bool:
        """Return whether the tensors are as they were kept."""
        marks = [(tensor._version, _address(tensor)) for tensor, *_ in self._marks]
        if marks != [(version, address) for _, version, address in self._marks]:
            return False
        return all(map(torch.equal, self._views, self._samples))


def own_weights(callbacks: Sequence[Any]) -> ExitStack:
    """Return a context in which models hold their own weights, and none that callbacks swapped in.

    Args:
        callbacks: those of the run.
    """
    with ExitStack() as entered:
        for callback in callbacks:
            if hasattr(callback, "set_aside"):  # it saves the weights that it has displaced
                entered.enter_context(callback.set_aside())
        return entered.pop_all()


def _local_tensor(tensor: Any) -> torch.Tensor:
    """Return a tensor, of a sharded one the shard here."""
    local: torch.Tensor = tensor.to_local() if collectives.is_sharded(tensor) else tensor
    return local


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor is in memory, which assigning to ``data`` changes; 0 if it is apart."""
    try:
        return 0 if collectives.is_sharded(tensor) else tensor.data_ptr()
    except RuntimeError:  # of a sparse tensor
        return 0


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of a few values of a weight."""
    dense = weight.detach()
    # In the order in which they are in memory, so that this is a view.
    dense = dense.permute(sorted(range(dense.dim()), key=dense.stride, reverse=True))
    values = dense.reshape(-1)
    if values.numel() and _address(values) != _address(weight):
        values = dense[(slice(0, 1),) * dense.dim()]  # of one with gaps
    return values[:: max(1, values.numel() // _SAMPLED)] if values.dim() == 1 else values
