"""Gradient accumulation: small batches, the steps of a big one; the end of an epoch included.

Trains twice on the same digits, with windows of three small batches and with big batches, and
shows that the weights are the same. (All small batches have the same size here; where they do not,
see token_normalized_accumulation.py.)

    python examples/by_feature/gradient_accumulation.py
    accel launch --num_processes 2 examples/by_feature/gradient_accumulation.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import Accelerator, set_seed


def load_data() -> list[TensorDataset]:
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    return random_split(data, [1408, 389], torch.Generator().manual_seed(0))


def train(
    args: argparse.Namespace, batch_size: int, window: int
) -> tuple[Accelerator, nn.Module, list[int]]:
    """The Accelerator, the trained model, and how many batches each step of an epoch had."""
    set_seed(0)
    accel = Accelerator(gradient_accumulation_steps=window, cpu=args.cpu)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(load_data()[0], batch_size, shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)

    for _ in range(args.epochs):
        windows, inside = [], 0
        for images, targets in loader:
            with accel.accumulate(model):  # the feature: step and zero_grad act once a window
                accel.backward(nn.functional.cross_entropy(model(images), targets))
                optimizer.step()
                optimizer.zero_grad()
                inside += 1
                if accel.sync_gradients:
                    windows.append(inside)
                    inside = 0
    return accel, accel.unwrap_model(model), windows


def accuracy(model: nn.Module) -> float:
    images, targets = load_data()[1][:]
    device = next(model.parameters()).device
    with torch.no_grad():
        return (model(images.to(device)).argmax(dim=1).cpu() == targets).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Accumulate gradients over small batches.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=16, help="of each process")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    steps = args.gradient_accumulation_steps
    accel, accumulated, windows = train(args, args.batch_size, steps)
    _, at_once, _ = train(args, args.batch_size * steps, 1)
    pairs = zip(accumulated.parameters(), at_once.parameters(), strict=True)
    difference = max((one - other).abs().max().item() for one, other in pairs)

    accel.print(f"batches in the steps of an epoch: {windows}")
    accel.print(f"accuracy {accuracy(accumulated):.1%}")
    accel.print(f"largest difference to the weights of big batches: {difference:.1e}")
    accel.end_training()


if __name__ == "__main__":
    main()
