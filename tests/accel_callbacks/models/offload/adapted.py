"""A small language model with adapters by hand, on an offloaded or a resident base."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from accel_callbacks import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from checkpoint_io import save_model

WORDS = 50


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # An odd width: tensors after the biases are not aligned in their file.
        self.up = torch.nn.Linear(width, 4 * width + 1)
        self.down = torch.nn.Linear(4 * width + 1, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Language(torch.nn.Module):
    """Tied weights, a parameter of its own, and blocks."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, width)
        self.start = torch.nn.Parameter(torch.randn(width))
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.start
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LoRA(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.A = torch.nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.B = torch.nn.Parameter(0.1 * torch.randn(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T


def pretrained(seed: int = 0) -> Language:
    torch.manual_seed(seed)
    return Language()


def saved(folder: Path | str, seed: int = 0) -> str:
    """Save the base in shards; return the folder."""
    save_model(pretrained(seed).state_dict(), str(folder), max_shard_size=20_000)
    return str(folder)


def dispatched(folder: str, device_map: dict[str, Any] | None = None, **options: Any) -> Any:
    with init_empty_weights():
        model = Language()
    return load_checkpoint_and_dispatch(model, folder, device_map or {"": "disk"}, **options)


def adapted(model: Any) -> Any:
    """Freeze the base and put an adapter into each block."""
    torch.manual_seed(1)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = LoRA(block.up)
    return model


def words(count: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, WORDS, (7,), generator=generator) for _ in range(count)]


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def prepared(model: Any, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    accel = Accelerator(cpu=True, **options)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loader = torch.utils.data.DataLoader(words(), batch_size=2)
    return accel, *accel.prepare(model, optimizer, loader)


def train(accel: Accelerator, model: Any, optimizer: Any, loader: Any, epochs: int = 1) -> Any:
    """Train by a loop with all that touches parameters; return losses and norms."""
    seen = []
    with accel.run("adapter") as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                with accel.accumulate(model):
                    with accel.autocast():
                        loss = loss_of(model, batch)
                    accel.backward(loss)
                    norm = accel.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                accel.log({"train/loss": loss})
                seen.append((loss.item(), None if norm is None else norm.item()))
            with accel.evaluate(model):
                for batch in loader:
                    accel.log({"val/loss": loss_of(model, batch)})
    return seen


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def resident(seed: int = 0) -> Any:
    return adapted(copy.deepcopy(pretrained(seed)))
