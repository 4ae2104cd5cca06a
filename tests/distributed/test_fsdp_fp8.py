"""Weights that FSDP gathers in float8, on two real processes, emulated on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_callbacks import AORecipeKwargs
from tests.support.sharded import accelerator, flat, whole

float8 = pytest.importorskip("torchao.float8")
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(32, 64)
        self.down = torch.nn.Linear(64, 32)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(7, 32)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.last = torch.nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def prepared(layout: str = "fsdp", gather: bool | None = None, plugin: Any = None, **options: Any):
    recipe = AORecipeKwargs(
        config=float8.Float8LinearConfig(emulate=True, pad_inner_dim=True), enable_fsdp_float8_all_gather=gather
    )
    accel = accelerator(
        layout, plugin, mixed_precision="fp8", kwargs_handlers=[recipe], **options
    )
    model = Network()
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return accel, model, optimizer


def train(accel: Any, model: Any, optimizer: Any, steps: int = 4) -> list[float]:
    torch.manual_seed(10 + accel.process_index)
    seen = []
    for _ in range(steps):
        inputs = torch.randn(8, 7)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def trained(gather: bool) -> tuple[list[float], list[float]]:
    accel, model, optimizer = prepared(gather=gather)
    return train(accel, model, optimizer), flat(model)


def test_it_trains_to_the_bit_as_weights_that_are_gathered_in_float32(pool):
    assert pool.run(trained, True) == pool.run(trained, False)
