"""Callbacks of Lightning, as they are, in a plain loop over real images of handwritten digits.

There is no Trainer and no LightningModule: the loop below is the whole training. EarlyStopping ends
it, ModelCheckpoint keeps the two best checkpoints, EMAWeightAveraging is what gets evaluated, and a
callback of your own uses `pl_module.log`.

    pip install "accel-callbacks[lightning,examples]"
    python examples/lightning_callbacks.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
)
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import Accelerator, set_seed
from accel_callbacks.callbacks.adapters import from_lightning


class GradientShare(pl.Callback):
    """Logs which part of the gradient the last layer has."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norms = [p.grad.norm() for p in pl_module.parameters()]
        pl_module.log(
            "last_layer_share", torch.stack(norms[-2:]).norm() / torch.stack(norms).norm()
        )


def load_data() -> list[TensorDataset]:
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    return random_split(data, [1437, 360], torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Lightning's callbacks without its Trainer.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--cpu", action="store_true", default=None)
    parser.add_argument("--project_dir", default="runs/lightning_callbacks")
    args = parser.parse_args()

    set_seed(0)
    best = ModelCheckpoint(
        Path(args.project_dir) / "best", "{epoch}-{val_loss:.3f}", "val_loss", save_top_k=2
    )
    accel = Accelerator(
        cpu=args.cpu,
        log_with="jsonl",
        project_dir=args.project_dir,
        callbacks=[
            ModelSummary(),
            EMAWeightAveraging(decay=0.9),
            GradientShare(),
            EarlyStopping("val_loss", patience=3),
            best,
            from_lightning(LearningRateMonitor(), log_every_n_steps=10),  # the option is ours
        ],
    )
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train, validation = load_data()
    model, optimizer, train, validation = accel.prepare(
        model, optimizer, DataLoader(train, 32, shuffle=True), DataLoader(validation, 120)
    )

    with accel.run("digits", resume=False) as run:
        for _ in run.epochs(args.epochs):
            for images, targets in train:
                loss = nn.functional.cross_entropy(model(images), targets)
                accel.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses, hits = [], []
            with accel.evaluate(model):  # with the averaged weights
                for images, targets in validation:
                    outputs, targets = accel.gather_for_metrics((model(images), targets))
                    losses.append(nn.functional.cross_entropy(outputs, targets))
                    hits.append((outputs.argmax(1) == targets).float().mean())
            accel.log(
                {"val_loss": torch.stack(losses).mean(), "accuracy": torch.stack(hits).mean()}
            )

    accel.print(f"stopped: {run.stop_reason}")
    accel.print(f"accuracy {100 * run.callback_metrics['accuracy']:.1f} %")
    for path, score in sorted(best.best_k_models.items(), key=lambda one: float(one[1])):
        accel.print(f"{float(score):.3f}  {path}")
    accel.load_state(best.best_model_path)  # a folder, which load_state reads as any other
    accel.print(f"loaded the best, of epoch {accel.current_run.current_epoch + 1}")
    accel.end_training()


if __name__ == "__main__":
    main()
