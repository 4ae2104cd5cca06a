"""The built-in callbacks, all in one training on 1,797 real images of handwritten digits.

python examples/callbacks.py
accel launch --num_processes 2 examples/callbacks.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import Accelerator, main_process_only, set_seed
from accel_callbacks.callbacks import (
    EMA,
    Checkpoint,
    DeviceStats,
    EarlyStopping,
    Freeze,
    GradientAccumulationScheduler,
    GradientNorm,
    LearningRateMonitor,
    ModelSummary,
    NonFinite,
    Preemption,
    Profiler,
    ProgressBar,
    SampleLogger,
    Throughput,
    Timer,
)


def build_callbacks() -> list:
    """Observers first, then what acts; Checkpoint and Preemption come last by themselves."""
    return [
        ModelSummary(),
        ProgressBar(),
        LearningRateMonitor(),
        GradientNorm(every_n_steps=10),
        Throughput(window=20, log_every_n_steps=20),
        DeviceStats(every_n_steps=20),
        SampleLogger(show_guesses, n=4),
        Profiler(wait=2, warmup=1, active=1, activities=["cpu"]),
        NonFinite(action="skip"),
        Freeze({"backbone.*": "1 epoch"}, lr_factor=0.5),
        GradientAccumulationScheduler({0: 2, 1: 1}),  # large batches while only the head learns
        EMA(decay=0.95),  # evaluations and what is saved at the end use it
        EarlyStopping("val/accuracy", mode="max", patience=2, min_epochs=2),
        Timer("10 min"),
        Checkpoint(every="1 epoch", monitor="val/accuracy", mode="max", keep_last=1),
        Preemption(),
    ]


def show_guesses(run, model, batch, outputs):
    """A few images of each validation, with what the model takes them for."""
    images, targets = batch
    guesses = model(images).argmax(dim=1)
    pairs = zip(guesses.tolist(), targets.tolist(), strict=True)
    return {"digits": images, "guesses": [f"{guess}, is {target}" for guess, target in pairs]}


class Net(nn.Module):
    """A backbone that may be frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))


def load_data() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)


@main_process_only
def report(accel: Accelerator, accuracy: float) -> None:
    run = accel.current_run
    print(accel.describe_callbacks())
    costly = accel.callback_report().rows[:3]
    print("costliest:", ", ".join(f"{row.callback}.{row.hook}" for row in costly))
    speed = run.callback_metrics["throughput/total_samples"]
    print(f"{run.global_step} steps, {speed} samples, best in {run.checkpoint_callback.best_path}")
    print(f"accuracy of the averaged weights {accuracy:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with the built-in callbacks.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--project_dir", default="runs/callbacks")
    args = parser.parse_args()
    set_seed(0)
    accel = Accelerator(callbacks=build_callbacks(), log_with="jsonl", project_dir=args.project_dir)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train, test = accel.prepare(model, optimizer, *load_data())
    accuracy = 0.0

    with accel.run("callbacks", config=vars(args), may_change="project_dir") as run:
        for _epoch in run.epochs(args.epochs):
            for images, targets in train:
                with accel.accumulate(model):
                    loss = nn.functional.cross_entropy(model(images), targets)
                    accel.backward(loss)
                    accel.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()
                    optimizer.zero_grad()
                accel.log({"train/loss": loss})
            hits = []
            with accel.evaluate(model):
                for images, targets in test:
                    guesses, labels = accel.gather_for_metrics((model(images).argmax(1), targets))
                    hits.append(guesses == labels)
            accuracy = torch.cat(hits).float().mean().item()
            accel.log({"val/accuracy": accuracy})
    report(accel, accuracy)
    accel.end_training()


if __name__ == "__main__":
    main()
