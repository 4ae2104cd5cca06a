"""A small task of classification, as the programs of one feature train it."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset


def rows(count: int = 64, seed: int = 1) -> TensorDataset:
    """Return points, and which of two classes each is of."""
    points = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.sum(1) > 0).long())


def loaders(size: int = 8) -> tuple[DataLoader, DataLoader]:
    """Return a shuffled loader to train with, and one to evaluate that ends with a part."""
    return DataLoader(rows(), size, shuffle=True), DataLoader(rows(27, seed=2), size)


def classifier() -> torch.nn.Module:
    """Return a model that draws in training."""
    layers = torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
    return torch.nn.Sequential(*layers)
