"""Weights that are elsewhere while their module does not run, as the core sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

__all__ = ["Placeholder", "keepers", "kept_elsewhere", "placeholders", "unwritable"]

#: Of a model each returns the tensors in memory that hold the weights behind its placeholders.
keepers: list[Callable[[torch.nn.Module], list[torch.Tensor]]] = []


class Placeholder(torch.Tensor):
    """A tensor without values, in the place of a weight that its module fetches to run."""

    @property
    def stays_in_file(self) -> bool:
        """True if the weight is only read, and nothing writes to it."""
        raise NotImplementedError


def kept_elsewhere(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors in memory that hold the weights behind placeholders."""
    return [tensor for keeper in keepers for tensor in keeper(model)]


def placeholders(model: torch.nn.Module) -> Iterator[tuple[str, Placeholder]]:
    """Yield the weights of a model that are fetched while their module runs, each once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return ((name, tensor) for name, tensor in named if isinstance(tensor, Placeholder))


def unwritable(model: torch.nn.Module) -> set[str]:
    """Return the names in a state dict of weights that stay in files, and are not written."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {
        name for name, tensor in named if isinstance(tensor, Placeholder) and tensor.stays_in_file
    }
