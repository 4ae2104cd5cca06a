"""The small model and data that several checks train with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.utils.data import TensorDataset

__all__ = ["flat_weights", "same_on_all", "samples", "small_model", "train_plainly"]


def small_model(seed: int = 3, dropout: float = 0.0) -> nn.Module:
    """A few layers, with the same numbers wherever the seed is the same."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)
        )


def samples(count: int) -> TensorDataset:
    """Inputs and targets, the same on all processes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :4] * 2 - 1)


def train_plainly(
    windows: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> torch.Tensor:
    """Train in plain torch, in one process, a step for each window; returns the weights."""
    model = small_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in windows:
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return flat_weights(model)


def flat_weights(model: nn.Module) -> torch.Tensor:
    """All parameters in one row."""
    return torch.cat([one.detach().float().flatten() for one in model.parameters()])


def same_on_all(rows: torch.Tensor) -> Iterator[int]:
    """The ranks whose row is not that of rank 0."""
    return (rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0]))
