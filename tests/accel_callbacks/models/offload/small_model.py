"""A small model with what makes placing hard: ties, own tensors, buffers, a norm in a block."""

from __future__ import annotations

from pathlib import Path

import torch

from accel_callbacks import init_empty_weights
from checkpoint_io import save_model


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width + 1)
        self.down = torch.nn.Linear(2 * width + 1, width)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        # A weight is used directly, not by its module's forward.
        return x + torch.relu(y @ self.up.weight.T + self.up.bias) @ self.down.weight.T


class Small(torch.nn.Module):
    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(20, width)
        self.position = torch.nn.Parameter(torch.randn(width))
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 20)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens) * self.scale + self.position
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def trained() -> Small:
    torch.manual_seed(0)
    model = Small().eval()
    for block in model.blocks:
        assert isinstance(block, Block)
        torch.nn.init.normal_(block.norm.running_mean)
    return model


def empty() -> Small:
    with init_empty_weights():
        return Small().eval()


def tokens() -> torch.Tensor:
    return torch.arange(14).reshape(2, 7)


def saved(folder: Path, model: torch.nn.Module | None = None) -> Path:
    """Save a model in several shards."""
    save_model((model or trained()).state_dict(), folder, max_shard_size=1500)
    return folder
