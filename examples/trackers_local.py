"""Trackers that need no package: JSON lines, a CSV file, and a table on the screen.

python examples/trackers_local.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, set_seed
from loggers import ConsoleTracker, read_csv, read_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description="Log to files and to the screen.")
    parser.add_argument("--project_dir", default="runs/trackers_local")
    folder = parser.parse_args().project_dir
    set_seed(0)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    table = ConsoleTracker(every_s=1, columns=["train/loss", "val/*"])
    accel = Accelerator(cpu=True, log_with=["jsonl", "csv", table], project_dir=folder)
    model, optimizer, train = accel.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))

    with accel.run("digits", config={"lr": 0.2, "model": {"width": 64}}) as run:
        for epoch in run.epochs(3):
            for inputs, labels in train:
                with accel.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accel.log({"train/loss": loss})
            with accel.evaluate(model):
                guesses = model(data.tensors[0]).argmax(dim=1)
            wrong = guesses != data.tensors[1]
            accel.log({"val/accuracy": 1 - wrong.float().mean(), "epoch": epoch})
            # CSV has no place for pictures and distributions; it says so, once each.
            pictures = data.tensors[0][wrong][:8].view(-1, 1, 8, 8)
            accel.log_images({"val/wrong": pictures}, captions={"val/wrong": _said(guesses[wrong])})
            accel.log_histogram({"weights": next(model.parameters())})
    accel.end_training()
    report(folder)


def _said(guesses: torch.Tensor) -> list[str]:
    return [f"taken for {guess}" for guess in guesses[:8].tolist()]


def report(folder: str) -> None:
    """Read the files back."""
    rows = read_csv(f"{folder}/metrics.csv")
    same = rows_of(rows) == rows_of(read_jsonl(f"{folder}/metrics.jsonl"))
    losses = [row["values"]["train/loss"] for row in rows if "train/loss" in row["values"]]
    print(f"{len(rows)} rows, the same in {folder}/metrics.csv and metrics.jsonl: {same}")
    print(f"loss {losses[0]:.2f} at step {rows[0]['step']}, {losses[-1]:.2f} at the end")
    pictures = read_jsonl(f"{folder}/metrics.jsonl", kind="images")
    print(f"first picture: {folder}/{pictures[0]['values']['val/wrong'][0]}")


def rows_of(rows: list[dict]) -> list[tuple[int, dict]]:
    return [(row["step"], row["values"]) for row in rows]


if __name__ == "__main__":
    main()
