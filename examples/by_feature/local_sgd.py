"""Local SGD: processes train on their own, and average their weights now and then.

Gradients stay on their process; every few steps the weights of all processes become their mean.
That is one exchange for many steps, for machines with a slow network between them.

    python examples/by_feature/local_sgd.py
    accel launch --num_processes 2 examples/by_feature/local_sgd.py --local_sgd_steps 8
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import Accelerator, LocalSGD, set_seed


def load_data() -> list[TensorDataset]:
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    return random_split(data, [1440, 357], torch.Generator().manual_seed(0))


def spread(accel: Accelerator, model: nn.Module) -> float:
    """The largest difference between the weights of any two processes."""
    with torch.no_grad():
        weights = torch.cat([one.flatten() for one in model.parameters()])
    largest, smallest = accel.reduce(weights, "max"), accel.reduce(weights, "min")
    return (largest - smallest).max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Average weights instead of gradients.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--local_sgd_steps", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    accel = Accelerator(cpu=args.cpu)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    train, test = load_data()
    model, optimizer, train, test = accel.prepare(
        model, optimizer, DataLoader(train, 16, shuffle=True), DataLoader(test, 64)
    )
    largest = steps = 0.0
    # The feature: inside, gradients are not averaged; `step` counts, and averages the weights.
    with LocalSGD(accelerator=accel, model=model, local_sgd_steps=args.local_sgd_steps) as local:
        for _ in range(args.epochs):
            for images, targets in train:
                with accel.accumulate(model):
                    accel.backward(nn.functional.cross_entropy(model(images), targets))
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
                    largest = max(largest, spread(accel, model))  # for show: it costs an exchange
                    local.step()

    hits = []
    with accel.evaluate(model):
        for images, targets in test:
            hits.append(accel.gather_for_metrics(model(images).argmax(dim=1) == targets))
    accel.print(f"{steps:.0f} steps, averaged every {args.local_sgd_steps}")
    accel.print(f"weights of the processes differed by {largest:.1e} at most")
    accel.print(f"weights of the processes differ by {spread(accel, model):.1e} at the end")
    accel.print(f"accuracy {torch.cat(hits).float().mean():.1%}")
    accel.end_training()


if __name__ == "__main__":
    main()
