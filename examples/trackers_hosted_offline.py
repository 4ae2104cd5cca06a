"""Comet, SwanLab and ClearML without an account: logged here, uploaded later or never.

pip install comet-ml swanlab clearml pillow
python examples/trackers_hosted_offline.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, set_seed
from loggers import ClearMLTracker, CometTracker, SwanLabTracker


def main() -> None:
    parser = argparse.ArgumentParser(description="Log to Comet, SwanLab and ClearML.")
    parser.add_argument("--project_dir", default="runs/trackers_hosted_offline")
    folder = parser.parse_args().project_dir
    set_seed(0)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trackers = [  # offline even where there is a key; leave it out, and the tools decide
        CometTracker(online=False),
        SwanLabTracker(mode="offline"),
        ClearMLTracker(offline=True),
    ]
    accel = Accelerator(cpu=True, log_with=trackers, project_dir=folder)
    model, optimizer, train = accel.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))

    with accel.run("digits", config={"optimizer": {"lr": 0.5}}) as run:
        for epoch in run.epochs(2):
            for inputs, labels in train:
                with accel.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accel.log({"train/loss": loss})
            with accel.evaluate(model):
                guesses = model(data.tensors[0]).argmax(dim=1)
            wrong = (guesses != data.tensors[1]).nonzero().flatten()
            accel.log({"val/accuracy": 1 - len(wrong) / len(guesses), "epoch": epoch})
            accel.log_images({"val/wrong": data.tensors[0][wrong[:4]].view(-1, 1, 8, 8)})
            pairs = zip(data.tensors[1][wrong].tolist(), guesses[wrong].tolist(), strict=True)
            accel.log_table("val/mistakes", columns=["digit", "guess"], data=[*map(list, pairs)])
    accel.end_training()

    root = Path(folder)
    for command, pattern in (
        ("comet upload {}", "comet/*.zip"),
        ("swanlab sync {}", "swanlab/run-*"),
        (
            "python -c 'import clearml; clearml.Task.import_offline_session({!r})'",
            "**/offline-*.zip",
        ),
    ):
        print(command.format(str(next(root.glob(pattern)))))


if __name__ == "__main__":
    main()
