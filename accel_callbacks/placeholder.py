"""Weights that are elsewhere while their module does not run, as the core sees them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["Placeholder", "kept_elsewhere", "placeholders", "unwritable"]


class Placeholder(torch.Tensor):
    """A tensor without values, in the place of a weight that its module fetches to run."""

    @property
    def stays_in_file(self) -> bool:
        """True if the weight is only read, and nothing writes to it."""
        raise NotImplementedError

    def kept(self) -> torch.Tensor | None:
        """Return the tensor in memory that holds the weight, None if there is none."""
        raise NotImplementedError


def kept_elsewhere(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors in memory that hold the weights behind placeholders."""
    tensors = [placeholder.kept() for _, placeholder in placeholders(model)]
    return [tensor for tensor in tensors if tensor is not None]


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
