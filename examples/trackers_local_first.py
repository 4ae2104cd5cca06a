"""Trackio and DVCLive: everything stays on this machine, and their own tools show it.

pip install trackio dvclive pillow
TRACKIO_DIR=runs/trackio python examples/trackers_local_first.py
TRACKIO_DIR=runs/trackio trackio show --project digits
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, set_seed
from loggers import DVCLiveTracker, TrackioTracker


def main() -> None:
    parser = argparse.ArgumentParser(description="Log to Trackio and DVCLive.")
    parser.add_argument("--project_dir", default="runs/trackers_local_first")
    folder = parser.parse_args().project_dir
    set_seed(0)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trackers = [TrackioTracker(auto_log_cpu=False), DVCLiveTracker(dir=f"{folder}/dvclive")]
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
            accel.log_text({"notes": f"Epoch {epoch + 1}: *{len(wrong)}* mistakes."})
    accel.end_training()

    summary = json.loads(Path(folder, "dvclive", "metrics.json").read_text(encoding="utf-8"))
    print(f"accuracy {summary['val']['accuracy']:.2%} at step {summary['step']}")
    print(f"pictures: {len(list(Path(folder).glob('dvclive/plots/images/**/*.png')))}")


if __name__ == "__main__":
    main()
