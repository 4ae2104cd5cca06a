"""Distributed evaluation: 357 samples, on any number of processes, each counted once.

The last batch is filled up, so that all processes get as many batches; `gather_for_metrics` knows
the filler and drops it. Without filler the shares are unequal, and a mean of each process has to
weigh what it stands for. Both are compared with plain torch on the whole set.

    python examples/by_feature/distributed_evaluation.py
    accel launch --num_processes 2 examples/by_feature/distributed_evaluation.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import Accelerator, DataLoaderConfiguration, set_seed


def load_data() -> list[TensorDataset]:
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    return random_split(data, [1440, 357], torch.Generator().manual_seed(0))


def gathered(accel: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[int, float, float]:
    """Count, accuracy and loss, from what all processes computed."""
    scores, labels = [], []
    with accel.evaluate(model):
        for images, targets in loader:
            # The feature: the samples of all processes, without those that fill up the last batch.
            batch_scores, batch_labels = accel.gather_for_metrics((model(images), targets))
            scores.append(batch_scores)
            labels.append(batch_labels)
    all_scores, all_labels = torch.cat(scores), torch.cat(labels)
    accuracy = (all_scores.argmax(dim=1) == all_labels).double().mean().item()
    loss = nn.functional.cross_entropy(all_scores, all_labels).item()
    return len(all_labels), accuracy, loss


def weighted(accel: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[int, float]:
    """Count and loss, from a mean of each process; less to send where outputs are large."""
    losses = []
    with accel.evaluate(model):
        for images, targets in loader:
            losses.append(nn.functional.cross_entropy(model(images), targets, reduction="none"))
    own = torch.cat(losses)
    # The feature: a mean of means that weighs them by what they stand for.
    mean = accel.reduce(own.mean(), "mean", weight=len(own))
    return int(accel.reduce(torch.tensor(len(own), device=accel.device), "sum")), mean.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate on several processes, exactly.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=50, help="of each process")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    accel = Accelerator(cpu=args.cpu)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_part, test_part = load_data()
    train = DataLoader(train_part, 32, shuffle=True)
    test = DataLoader(test_part, args.batch_size)
    model, optimizer, train, filled = accel.prepare(model, optimizer, train, test)
    for _ in range(args.epochs):
        for images, targets in train:
            accel.backward(nn.functional.cross_entropy(model(images), targets))
            optimizer.step()
            optimizer.zero_grad()

    # A second Accelerator with another option, for the same model and the same loader.
    unfilled = Accelerator(
        cpu=args.cpu, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    with torch.no_grad():  # plain torch, all samples at once
        images, targets = (part.to(accel.device) for part in test_part[:])
        scores = accel.unwrap_model(model)(images)
        loss = nn.functional.cross_entropy(scores, targets).item()
        accuracy = (scores.argmax(dim=1) == targets).double().mean().item()

    results = {
        "plain torch": (len(targets), accuracy, loss),
        "gather_for_metrics": gathered(accel, model, filled),
        "weighted means": weighted(unfilled, model, unfilled.prepare(test)),
    }
    for name, (count, *values) in results.items():
        shown = " ".join(f"{value:.6f}" for value in values)
        accel.print(f"{name}: {count} samples; {shown}")
    accel.end_training()


if __name__ == "__main__":
    main()
