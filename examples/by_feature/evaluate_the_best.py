"""Evaluate the best checkpoint: its weights are lent for a block, and the run stays where it is.

A network learns digits, and from the fourth epoch on at a rate that is too high, so that its last
epoch is not its best. The best checkpoint is tested while the run is open, and again by a new
Accelerator that has not trained.

    python examples/by_feature/evaluate_the_best.py
    accel launch --num_processes 2 examples/by_feature/evaluate_the_best.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, set_seed
from accel_callbacks.callbacks import EMA, Checkpoint


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, targets = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets)
    return TensorDataset(*(one[:1400] for one in data)), TensorDataset(
        *(one[1400:] for one in data)
    )


def prepared(args: argparse.Namespace) -> tuple[Accelerator, nn.Module]:
    set_seed(0)
    saver = Checkpoint(monitor="accuracy", mode="max")
    callbacks = [EMA(decay=0.9), saver]
    accel = Accelerator(cpu=args.cpu, project_dir=args.project_dir, callbacks=callbacks)
    return accel, nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(accel: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    hits = [
        accel.gather_for_metrics(model(images).argmax(dim=1) == targets)
        for images, targets in loader
    ]
    return torch.cat(hits).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the best checkpoint.")
    parser.add_argument("--project_dir", default="runs/evaluate_the_best")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()
    train_data, test_data = digits()

    accel, model = prepared(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    train, test = DataLoader(train_data, 32, shuffle=True), DataLoader(test_data, 64)
    model, optimizer, train, test = accel.prepare(model, optimizer, train, test)
    scores: list[float] = []
    with accel.run("evaluate-the-best", resume=False) as run:
        for epoch in run.epochs(6):
            if epoch == 3:
                optimizer.param_groups[0]["lr"] = 3.0
            for images, targets in train:
                accel.backward(nn.functional.cross_entropy(model(images), targets))
                optimizer.step()
                optimizer.zero_grad()
            with accel.evaluate(model):
                scores.append(accuracy(accel, model, test))
            accel.log({"accuracy": scores[-1]})
        before = [p.clone() for p in model.parameters()]
        # The feature: the weights of the best checkpoint (here their average), for this block.
        with accel.evaluate(model, checkpoint="best", stage="test"):
            best = accuracy(accel, model, test)
        back = all(map(torch.equal, before, model.parameters()))

    accel, model = prepared(args)
    model, test = accel.prepare(model, DataLoader(test_data, 64))
    # And in a script that does not train.
    with accel.evaluate(model, checkpoint="best", stage="test"):
        again = accuracy(accel, model, test)

    accel.print("accuracy of each epoch: " + " ".join(f"{score:.3f}" for score in scores))
    accel.print(f"the best checkpoint has {best:.3f}, in a new script {again:.3f}")
    accel.print(f"it is the best epoch: {best == again == max(scores)}")
    accel.print(f"the weights of the run are back: {back}")
    accel.end_training()


if __name__ == "__main__":
    main()
