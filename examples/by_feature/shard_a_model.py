"""Shard a model: each process keeps a part of the weights, gradients and optimizer states.

One argument of the Accelerator, or a flag of the launcher; the loop is the one of a single
process. With --replicas 2 on four processes, each two of them share a replica (HSDP). The result
is what a process holds, and the accuracy, which is that of the other strategies.

    python examples/by_feature/shard_a_model.py
    accel launch --num_processes 2 examples/by_feature/shard_a_model.py
    accel launch --num_processes 4 examples/by_feature/shard_a_model.py --replicas 2
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    set_seed,
)


class Block(nn.Module):
    """A residual block; the blocks that a model repeats are gathered one at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.relu(self.layer(self.norm(inputs)))


def build_model() -> nn.Module:
    blocks = nn.Sequential(*(Block(128) for _ in range(4)))
    return nn.Sequential(nn.Linear(64, 128), blocks, nn.LayerNorm(128), nn.Linear(128, 10))


def local_elements(tensors) -> int:
    """Elements that this process keeps of tensors, sharded or not."""
    return sum(t.to_local().numel() if hasattr(t, "to_local") else t.numel() for t in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description="Shard a model over the processes.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    world = PartialState(cpu=args.cpu).num_processes
    accel = Accelerator(
        cpu=args.cpu,
        # The feature: shards over the processes of each replica.
        parallelism_config=ParallelismConfig(
            dp_replicate_size=args.replicas, dp_shard_size=world // args.replicas
        ),
        fsdp_plugin=FullyShardedDataParallelPlugin(),
    )
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    train, test = random_split(data, [1440, 357], torch.Generator().manual_seed(0))
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train, test = accel.prepare(
        model,
        optimizer,
        DataLoader(train, args.batch_size // accel.data_world, shuffle=True),
        DataLoader(test, 64),
    )
    for _ in range(args.epochs):
        for images, targets in train:
            loss = nn.functional.cross_entropy(model(images), targets)
            accel.backward(loss)
            accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    hits = []
    with accel.evaluate(model):
        for images, targets in test:
            hits.append(accel.gather_for_metrics(model(images).argmax(dim=1) == targets))
    weights = list(model.parameters())
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    accel.print(f"{sum(w.numel() for w in weights):,} weights; this process keeps")
    accel.print(f"{local_elements(weights):,} of them and {local_elements(states):,} states")
    accel.print(f"accuracy {torch.cat(hits).float().mean():.1%}")
    accel.end_training()


if __name__ == "__main__":
    main()
