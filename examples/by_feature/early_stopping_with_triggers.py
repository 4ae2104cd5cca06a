"""Early stopping with triggers: one process says stop, and all of them do, at the same step.

Each process watches the loss of its own share of the validation images, which no other process
sees. The first whose loss has not fallen for some epochs sets the trigger.
(`EarlyStopping` of `accel_callbacks.callbacks` does it for a metric of all processes.)

    python examples/by_feature/early_stopping_with_triggers.py
    accel launch --num_processes 2 examples/by_feature/early_stopping_with_triggers.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import Accelerator, set_seed


def load_data() -> list[TensorDataset]:
    """Few images to train on, so that they are soon learned by heart."""
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    return random_split(data, [300, 1497], torch.Generator().manual_seed(0))


def own_loss(accel: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The mean loss over the share of this process."""
    losses = []
    with accel.evaluate(model):
        for images, targets in loader:
            losses.append(nn.functional.cross_entropy(model(images), targets))
    return torch.stack(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Stop all processes when one asks for it.")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--patience", type=int, default=2, help="epochs without a lower loss")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    accel = Accelerator(cpu=args.cpu)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train, validation = load_data()
    model, optimizer, train, validation = accel.prepare(
        model, optimizer, DataLoader(train, 25, shuffle=True), DataLoader(validation, 250)
    )
    own_losses: list[float] = []
    steps = waited = 0
    for _ in range(args.epochs):
        for images, targets in train:
            accel.backward(nn.functional.cross_entropy(model(images), targets))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        own_losses.append(own_loss(accel, model, validation))
        waited = len(own_losses) - 1 - own_losses.index(min(own_losses))
        if waited >= args.patience:
            accel.set_trigger()  # the feature: any process may ask
        if accel.check_trigger():  # and all of them learn of it here
            break

    own = torch.tensor([[steps, waited]], device=accel.device)
    taken, waits = accel.gather(own).T.tolist()
    accel.print(f"stopped after epoch {len(own_losses)} of {args.epochs}")
    accel.print(f"epochs without a lower loss, of each process: {waits}")
    accel.print(f"steps of each process: {taken}")
    accel.end_training()


if __name__ == "__main__":
    main()
