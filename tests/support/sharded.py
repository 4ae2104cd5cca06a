"""What tests of sharded models share: a model whose sizes no number of ranks divides, and runs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from tests.support.bound import BOUND

WIDTH = 30


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.tanh(self.linear(x)))


class Network(torch.nn.Module):
    """Sizes of 7, 30 and 1: some ranks hold fewer rows than others, and some hold none."""

    def __init__(self, seed: int = 0, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(7, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """A method besides the forward, which uses weights of the model itself."""
        return self.last(self.first(x))


def accelerator(layout: str = "fsdp", plugin: Any = None, **options: Any) -> Accelerator:
    """An Accelerator for a layout: ``"ddp"``, ``"fsdp"``, or ``"hsdp"`` (2 replicas)."""
    if layout == "hsdp":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    if layout != "ddp":
        options["fsdp_plugin"] = plugin or FullyShardedDataParallelPlugin()
    return Accelerator(cpu=True, timeout=BOUND, **options)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 7, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def loader(accel: Accelerator, samples: int, batch: int = 8) -> DataLoader[Any]:
    """A loader of the same global batches on any number of ranks."""
    return DataLoader(data(samples), batch // accel.num_processes)


def batch_of(samples: int) -> torch.Tensor:
    """The same inputs on all ranks."""
    return data(samples).tensors[0]


def step(accel: Any, model: Any, optimizer: Any, inputs: torch.Tensor) -> None:
    """A step of training."""
    accel.backward(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Collective: the whole tensor of a shard."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def flat(*models: torch.nn.Module) -> list[float]:
    """Collective: all weights, as numbers: tensors do not travel out of a pool."""
    return torch.cat([whole(p).flatten() for m in models for p in m.parameters()]).tolist()


def quiet() -> None:
    """Leave out the warnings of torch itself about its own collectives."""
    warnings.filterwarnings("ignore", category=FutureWarning)
