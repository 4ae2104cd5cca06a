"""Train an adapter by hand (LoRA) on a frozen model whose weights stay on disk.

python examples/by_feature/adapter_on_a_large_model.py
accel launch --num_processes 2 examples/by_feature/adapter_on_a_large_model.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import (
    Accelerator,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    set_seed,
)
from accel_callbacks.offload import report

FOLDER = "adapter-base-weights"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class LoRA(nn.Module):
    """A layer, and the product of two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), *(Block(128) for _ in range(6)))


def adapt(base: nn.Sequential) -> nn.Sequential:
    """Freeze a base, put an adapter into each block, and add a head."""
    base.requires_grad_(False)
    for block in base:
        if isinstance(block, Block):
            block.linear = LoRA(block.linear)
    return nn.Sequential(base, nn.Linear(128, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an adapter on a model that is on disk.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()
    accel = Accelerator(cpu=args.cpu, gradient_accumulation_steps=2)

    # Stands for weights that were downloaded.
    set_seed(0)
    accel.save_model(build(), FOLDER)
    accel.wait_for_everyone()

    # The feature: the base stays on disk, and is fetched for the forward and the backward pass.
    with init_empty_weights():
        base = build()
    base = load_checkpoint_and_dispatch(base, FOLDER, device_map={"": "disk"})
    set_seed(1)
    model = adapt(base)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    loader = DataLoader(data, args.batch_size // accel.num_processes, shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    for _ in range(args.epochs):
        correct = 0
        for inputs, labels in loader:
            with accel.accumulate(model):
                outputs = model(inputs)
                accel.backward(nn.functional.cross_entropy(outputs, labels))
                optimizer.step()
                optimizer.zero_grad()
            correct += int(accel.gather_for_metrics(outputs.argmax(1) == labels).sum())
    accel.print(f"accuracy in the last epoch: {100 * correct / len(data):.1f} %")

    saved = accel.save_state("runs/adapter", trainable_only=True)
    size = sum(file.stat().st_size for file in Path(saved).glob("*.safetensors"))
    after = report(accel.unwrap_model(model))
    accel.print(
        f"{after.on_disk} bytes of the base on disk, {after.traffic.peak} at most in memory"
    )
    accel.print(f"{size} bytes of tensors in the checkpoint")
    accel.end_training()


if __name__ == "__main__":
    main()
