"""Background saving: `save_state` returns once the state is copied, and training goes on.

python examples/by_feature/background_saving.py
accel launch --num_processes 2 examples/by_feature/background_saving.py
python examples/by_feature/background_saving.py --output s3://bucket/digits
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, TrainingRun, broadcast_object, set_seed
from accel_callbacks.callbacks import Callback


class Told(Callback):
    """Notes when a checkpoint is durable: at the end of a step, on all processes alike."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def on_checkpoint_saved(self, run: TrainingRun, model: nn.Module, path: str) -> None:
        self.paths.append(path)


def digits() -> TensorDataset:
    images, targets = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))


def total(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(one.double().sum().item() for one in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description="Save while training goes on.")
    parser.add_argument("--output", default=None, help="a folder or any fsspec URL")
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    told = Told()
    accel = Accelerator(cpu=args.cpu, callbacks=[told])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, train = accel.prepare(
        model, optimizer, DataLoader(digits(), 32, shuffle=True)
    )
    output = args.output or broadcast_object(tempfile.mkdtemp())
    step, saved, path = 0, 0.0, ""
    for images, targets in train:
        with accel.accumulate(model):
            accel.backward(nn.functional.cross_entropy(model(images), targets))
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % args.every == 0:
            # The feature: the state as it is now, however far training gets meanwhile.
            path = accel.save_state(f"{output}/step-{step}", async_save=True)
            saved = total(model)
    moved = total(model) != saved
    accel.wait_for_save()  # the end of training waits as well
    accel.print(f"{len(told.paths)} checkpoints of {step} steps")
    accel.load_state(path)
    accel.print(f"trained on after the last save: {moved}")
    accel.print(f"loaded what was saved: {total(model) == saved}")
    accel.end_training()


if __name__ == "__main__":
    main()
