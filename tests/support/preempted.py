"""A small training that can be preempted: run as a script, or as a function by the tests."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from accel_callbacks import Accelerator, set_seed
from accel_callbacks.callbacks import Checkpoint, Preemption

EPOCHS = 3  # of 12 steps on one process, of 6 on two


def train(
    folder: str | os.PathLike[str] | None,
    each_step: Callable[[int], None] = lambda step: None,
    **options: object,
) -> list[float]:
    """Train to the end, or until it is preempted; returns the weights."""
    set_seed(3)
    callbacks = [Preemption(**options)]
    if folder is not None:
        callbacks.append(Checkpoint(folder, every_n_steps=1000))
    accel = Accelerator(cpu=True, callbacks=callbacks, timeout=timedelta(minutes=10))
    model = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    data = torch.utils.data.DataLoader(torch.randn(48, 4), 4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    with accel.run("preempted", resume=folder is not None) as run:
        for _ in run.epochs(EPOCHS):
            for batch in data:
                accel.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                each_step(run.global_step)
    return [x.item() for p in accel.unwrap_model(model).parameters() for x in p.flatten()]


def main(folder: str, pace: float, hold: int = 0) -> None:
    """Write down each step, slowly, so that somebody can send a signal; the weights at the end.

    The step ``hold`` goes on once there is a file "go".
    """
    rank = os.environ.get("RANK", "0")

    def each_step(step: int) -> None:
        with open(f"{folder}/steps-{rank}", "a") as file:
            file.write(f"{step}\n")
        time.sleep(pace)
        while step == hold and not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)

    weights = train(f"{folder}/checkpoints", each_step, requeue="slurm")
    with open(f"{folder}/weights-{rank}", "w") as file:
        json.dump(weights, file)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:]))
