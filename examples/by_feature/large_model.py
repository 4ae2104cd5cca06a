"""A large model: built without weights, sharded, then filled from a file, each process its part.

Blocks are computed again in the backward pass, so that their activations take no memory.

    python examples/by_feature/large_model.py
    accel launch --num_processes 2 examples/by_feature/large_model.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    load_checkpoint_in_model,
    set_seed,
)

FOLDER = "large-model-weights"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def build() -> nn.Module:
    blocks = nn.Sequential(*(Block(64) for _ in range(8)))
    return nn.Sequential(blocks, nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description="Start a model that no process could hold.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=64, help="of all processes together")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    accel = Accelerator(cpu=args.cpu, fsdp_plugin=plugin)

    # Stands for weights that were downloaded.
    set_seed(0)
    pretrained = build()
    accel.save_model(pretrained, FOLDER)
    accel.wait_for_everyone()

    # The feature: no memory is taken here, for a part of it in prepare, and only that part is read.
    with accel.init_module():
        model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    size = args.batch_size // accel.num_processes
    loader = DataLoader(data, size, shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    load_checkpoint_in_model(model, FOLDER)

    elements = sum(p.numel() for p in pretrained.parameters())
    parts = (getattr(p, "to_local", p.detach)() for p in model.parameters())
    held = accel.gather(torch.tensor([sum(part.numel() for part in parts)], device=accel.device))
    accel.print(f"each process holds {held.tolist()} of {elements} elements")

    for _ in range(args.epochs):
        correct = 0
        for inputs, labels in loader:
            outputs = model(inputs)
            accel.backward(nn.functional.cross_entropy(outputs, labels))
            optimizer.step()
            optimizer.zero_grad()
            hits = accel.gather_for_metrics(outputs.argmax(1) == labels)
            correct += int(hits.sum())
    accel.print(f"accuracy in the last epoch: {100 * correct / len(data):.1f} %")
    accel.end_training()


if __name__ == "__main__":
    main()
