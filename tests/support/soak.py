"""A long run of a tiny model with most of what the library has; prints what it holds as JSON lines.

    python -m tests.support.soak FOLDER --steps 50000

Twelve callbacks, three trackers, evaluations, a checkpoint in the background every 100 steps by
the callback and every 250 by the loop, both with retention. Each sample is taken when no save is
pending and all rows are written, after a garbage collection.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, ProjectConfiguration
from accel_callbacks.callbacks import (
    EMA,
    Checkpoint,
    DeviceStats,
    EarlyStopping,
    GradientNorm,
    LearningRateMonitor,
    ModelSummary,
    NonFinite,
    Preemption,
    ProgressBar,
    Throughput,
    Timer,
)


def descriptors_after(seconds: float) -> int:
    """Open files: a journal or a tracker has one open for a moment, which is none that stays."""
    time.sleep(seconds)
    return len(os.listdir("/proc/self/fd"))


def sample(accel: Accelerator, folder: Path, types: bool) -> dict[str, Any]:
    """What the process holds now."""
    accel.wait_for_save()
    accel.tracking.hub.flush()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    objects = gc.get_objects()
    found: dict[str, Any] = {
        "step": accel.current_run.global_step,
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "descriptors": min(map(descriptors_after, (0.0, 0.02, 0.02))),
        "objects": len(objects),
        "checkpoint_files": sum(len(files) for _, _, files in os.walk(folder / "checkpoints")),
    }
    if types:
        found["types"] = Counter(type(one).__qualname__ for one in objects).most_common(400)
    return found


def train(folder: Path, steps: int, samples: int, types: bool) -> None:
    """Train, and print a sample every so often."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accel = Accelerator(
        cpu=True,
        log_with=["jsonl", "csv", "tensorboard"],
        project_config=ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2
        ),
        callbacks=[
            Checkpoint(
                folder / "checkpoints" / "kept",
                every_n_steps=100,
                keep_last=3,
                monitor="val/loss",
                async_save=True,
            ),
            EMA(),
            EarlyStopping("val/loss", patience=10**9),
            LearningRateMonitor(),
            GradientNorm(),
            DeviceStats(),
            Throughput(),
            Timer(),
            NonFinite(),
            ProgressBar(),
            Preemption(),
            ModelSummary(),
        ],
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.99)
    inputs = torch.randn(200 * 8, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader, held_out = DataLoader(data, 8, shuffle=True), DataLoader(data, 400)
    model, optimizer, loader, held_out, scheduler = accel.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    every = steps // samples
    with accel.run("soak") as run:
        for _ in run.epochs(-(-steps // len(loader))):
            for batch, targets in loader:
                with accel.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(batch), targets)
                    accel.backward(loss)
                    accel.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                accel.log({"train/loss": loss})
                if run.global_step % 250 == 0:
                    accel.save_state(async_save=True)
                if run.global_step % every == 0:
                    print(json.dumps(sample(accel, folder, types)), flush=True)
            with accel.evaluate(model):
                losses = [
                    accel.gather_for_metrics(torch.nn.functional.mse_loss(model(batch), targets))
                    for batch, targets in held_out
                ]
            accel.log({"val/loss": torch.stack(losses).mean()})
        hub = accel.tracking.hub
    print(json.dumps({"trackers": {name: vars(one) for name, one in hub.report().items()}}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--types", action="store_true", help="count the objects of each type")
    options = parser.parse_args()
    train(options.folder, options.steps, options.samples, options.types)
