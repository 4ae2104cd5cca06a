"""Loops of unusual shapes that resume to the weights of the unbroken run, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
from tests.support.bound import BOUND

STEPS, LAST = 7, 5


class Left(Exception):
    """The machine is gone."""


def asked(loader: Any) -> Iterator[tuple[float, Any]]:
    """Draw before each batch."""
    batches = iter(loader)
    while True:
        factor = random.random() + float(torch.rand(1))
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        yield factor, batch


def wrapped(loader: Any) -> Iterator[tuple[float, Any]]:
    """Draw before each batch of a generator around the loader."""

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()
    while True:
        factor = random.random()
        yield factor, next(batches)


def iterated(loader: Any) -> Iterator[tuple[float, Any]]:
    """Draw after each step, for the next one."""
    factor = 1.0
    while True:
        for _, batch in enumerate(loader):
            yield factor, batch
            random.random()


def dropped_out(loader: Any) -> Iterator[tuple[float, Any]]:
    """Draw in the body of a ``for``, before the step and after it."""
    while True:
        for batch in loader:
            yield random.random(), batch
            torch.rand(3)


@pytest.mark.parametrize("shape", [asked, wrapped, iterated, dropped_out])
def test_draws_around_the_next_batch_are_drawn_once(tmp_path, shape):
    def train(folder: Path, end: int) -> tuple[list[Any], torch.Tensor]:
        random.seed(0)
        torch.manual_seed(0)
        saver = Checkpoint(every_n_steps=2, async_save=False)
        accel = Accelerator(cpu=True, project_dir=folder, callbacks=[saver])
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        data = DataLoader(torch.arange(48.0).view(12, 4) / 48, 3, shuffle=True)
        model, optimizer, loader = accel.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data)
        seen = []
        with accel.run("draws") as run:
            for factor, batch in shape(loader):
                accel.backward(factor * model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                seen.append((run.global_step, factor, batch.tolist()))
                if run.global_step == end:
                    if end < STEPS:
                        raise Left
                    break
        return seen, torch.cat([p.detach().flatten() for p in net.parameters()])

    whole, weights = train(tmp_path / "whole", STEPS)
    with pytest.raises(Left):
        train(tmp_path / "cut", LAST)
    seen, resumed = train(tmp_path / "cut", STEPS)
    assert seen == whole[LAST - 1 :]  # after the checkpoint of step 4
    assert torch.equal(resumed, weights)


def accumulated(folder: Path | None, save_at: int | None, resume_at: int | None, own: bool) -> Any:
    """Accumulate over three batches without ``accumulate``; return the weights of two optimizers.

    Args:
        folder: of the checkpoint.
        save_at: the batches done at the save, after which nothing is trained.
        resume_at: the batches done before the checkpoint to begin with.
        own: the loop iterates no prepared loader.
    """
    torch.manual_seed(0)
    accel = Accelerator(cpu=True, timeout=BOUND)
    nets = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    each, third = (torch.optim.SGD(net.parameters(), 1e-3) for net in nets)
    first, second, each, third = accel.prepare(*nets, each, third)
    data = torch.arange(12.0 * accel.num_processes)[:, None]
    loader: Any = accel.prepare(DataLoader(data, 1))
    done = resume_at or 0
    if done:
        accel.load_state(folder)
    if own:
        loader = data[done * accel.num_processes + accel.process_index :: accel.num_processes, None]
    for index, batch in enumerate(loader, start=done + 1):
        accel.backward(first(batch).mean() + second(batch).mean())
        each.step()
        each.zero_grad()
        if index % 3 == 0:
            third.step()
            third.zero_grad()
        if index == save_at:
            accel.save_state(folder)
            return None
    return [float(p.detach()) for net in nets for p in net.parameters()]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("done", [3, 4, 5])
def test_gradients_that_a_script_accumulates_by_itself_are_saved(tmp_path, done, own):
    accumulated(tmp_path, done, None, own)
    assert accumulated(tmp_path, None, done, own) == accumulated(None, None, None, own)


def test_gradients_of_a_step_that_is_done_are_not_saved(tmp_path):
    accel = Accelerator(cpu=True)
    net = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(net, torch.optim.SGD(net.parameters(), 1e-3))
    for batch in accel.prepare(DataLoader(torch.arange(4.0)[:, None], 1)):
        optimizer.zero_grad()
        accel.backward(model(batch).mean())
        optimizer.step()
        _, local = accel.training_state.capture()
        assert "window" not in local
