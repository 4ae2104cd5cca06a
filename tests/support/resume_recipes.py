"""Loops that count their own epochs, and the ways in which scripts for Accelerate resume them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, DataLoaderConfiguration
from accel_callbacks.compat.names import resolve
from tests.support.bound import BOUND

__all__ = ["PLACES", "RECIPES", "rest_of", "resume", "train"]

BATCHES, EPOCHS = 13, 2
RECIPES = ("skip", "continue", "none", "stateful")
#: Batches done at a save, and whether it came in the body of the loop or after its end.
PLACES = {
    "early": (5, True),
    "in the second epoch": (18, True),
    "late": (24, True),
    "last batch of an epoch": (13, True),
    "after an epoch": (13, False),
}


def train(
    folder: Path | None,
    recipe: str,
    alias: bool,
    *,
    save_at: tuple[int, bool] | None = None,
    resume_at: int | None = None,
) -> list[list[int]]:
    """Return the samples of the batches that were trained on, up to a save or to the end.

    Args:
        folder: of the checkpoint.
        recipe: how the script resumes.
        alias: it has imported ``accelerate``.
        save_at: a place.
        resume_at: the batches done before the checkpoint, as the script knows from its name.
    """
    torch.manual_seed(0)
    kind = resolve("accelerate", "Accelerator") if alias else Accelerator
    options: dict[str, Any] = {"timeout": BOUND}
    if recipe == "stateful":
        name = "DataLoaderConfiguration"
        config = resolve("accelerate.utils", name) if alias else DataLoaderConfiguration
        options["dataloader_config"] = config(use_stateful_dataloader=True)
    accel = kind(cpu=True, **options)
    net = torch.nn.Linear(1, 1)
    samples = torch.arange(2.0 * BATCHES * accel.num_processes)[:, None]
    model, optimizer, loader = accel.prepare(
        net, torch.optim.SGD(net.parameters(), 1e-5), DataLoader(samples, 2, shuffle=True)
    )
    step, first, skip = 0, 0, 0
    if resume_at is not None:
        accel.load_state(folder)
        step = resume_at
        first, skip = divmod(step, len(loader))
    seen: list[list[int]] = []
    for epoch in range(first, EPOCHS):
        resumes = epoch == first and skip > 0
        view = accel.skip_first_batches(loader, skip) if recipe == "skip" and resumes else loader
        for index, batch in enumerate(view):
            if recipe == "continue" and resumes and index < skip:
                continue
            accel.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            seen.append(batch.flatten().int().tolist())
            if save_at == (step, True):
                accel.save_state(folder)
                return seen
        if save_at == (step, False):
            accel.save_state(folder)
            return seen
    return seen


def resume(folder: Path, recipe: str, place: str, alias: bool) -> list[list[int]]:
    """Return what a script trains on after a save at this place."""
    train(folder / "state", recipe, alias, save_at=PLACES[place])
    return train(folder / "state", recipe, alias, resume_at=PLACES[place][0])


def rest_of(whole: list[list[int]], recipe: str, place: str, alias: bool) -> list[list[int]] | None:
    """Return what is to be trained on: as on Accelerate, else the rest; None for an error.

    Without a step to come, in the last epoch, the error is a warning.

    Args:
        whole: the batches of the unbroken run.
        recipe: how the script resumes.
        place: of the save.
        alias: it has imported ``accelerate``.
    """
    done = PLACES[place][0]
    if recipe == "none" and alias:  # it begins its epoch anew
        return whole[done // BATCHES * BATCHES :]
    if recipe == "continue" and not alias and done % BATCHES:
        return [] if place == "late" else None
    return whole[done:]
