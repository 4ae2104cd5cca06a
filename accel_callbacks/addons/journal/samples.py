"""The samples of a step: drawn again as the journal says that they were drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

from accel_callbacks.addons.journal.format import UNKNOWN, JournalError
from accel_callbacks.addons.journal.reader import Journal
from accel_callbacks.data.order import Draws, epoch_order
from accel_callbacks.data.sampler import SeedableRandomSampler, set_seed_and_epoch, with_inner
from accel_callbacks.data.shard import BatchPlan, SamplePlan

__all__ = ["StepSamples", "samples_of"]


@dataclass(frozen=True)
class StepSamples:
    """The indices of the samples of one optimizer step.

    Args:
        step: the optimizer step, from 1.
        attempt: the start of the run that took it.
        epoch: of the loader.
        begin: samples of the epoch delivered before, over all ranks.
        end: the same after it.
        batches: for each micro-batch the indices of each rank, repetitions at the end included.

    Example:
        >>> from accel_callbacks.journal import StepSamples
        >>> StepSamples(1, 1, 0, 0, 4, [[[3, 1], [0, 2]]]).batches[0][1]
        [0, 2]
    """

    step: int
    attempt: int
    epoch: int
    begin: int
    end: int
    batches: Sequence[Sequence[Sequence[Any]]]


def samples_of(journal: Journal, step: int, loader: Any = None) -> StepSamples:
    """Return the indices of the samples of a step, as its last attempt drew them.

    Args:
        journal: of the run.
        step: the optimizer step, from 1.
        loader: the DataLoader of the script, for a sampler of which the journal has the name alone.

    Raises:
        JournalError: the journal does not have the step, or not what its order came from.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.journal import Journal, samples_of
        >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> data = torch.utils.data.DataLoader(torch.ones(6), batch_size=2)
        >>> optimizer, data = accel.prepare(torch.optim.SGD([weight], lr=0.5), data)
        >>> with accel.run("demo"):
        ...     for batch in data:
        ...         accel.backward((weight * batch).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> samples_of(Journal.read(accel.project_dir), step=2).batches
        [[[2, 3]]]
    """
    rows = journal.rows()
    places = np.flatnonzero((rows["step"] == step) & ~rows["repeated"])
    if not len(places):
        steps = rows["step"]
        known = f"it has {steps.min()} to {steps.max()}" if len(rows) else "it is empty"
        raise JournalError(f"the journal of {journal.folder} has no step {step}: {known}.")
    place = int(places[0])
    row = rows[place]
    if row["position"] == UNKNOWN:
        raise JournalError(
            f"step {step} was taken on data of the loop's own, whose samples nothing counts: "
            "prepare the DataLoader."
        )
    attempt, epoch, end = int(row["attempt"]), int(row["epoch"]), int(row["position"])
    layout = _layout(journal, attempt, epoch, step)
    before = rows[max(place - 1, 0)]
    follows = before["attempt"] == row["attempt"] and before["epoch"] == row["epoch"]
    follows = follows and before["position"] < row["position"]
    begin = int(before["position"]) if follows else int(layout["position"])
    batches = _batches(layout, epoch, begin, end, loader)
    return StepSamples(step, attempt, epoch, begin, end, batches)


def _layout(journal: Journal, attempt: int, epoch: int, step: int) -> Mapping[str, Any]:
    """Return how the pass of a step was laid out, as it was noted last."""
    marks = [
        mark["layout"]
        for mark in journal.marks
        if mark.get("kind") == "pass" and mark["attempt"] == attempt and mark["epoch"] == epoch
    ]
    if not marks:
        raise JournalError(
            f"the journal of {journal.folder} does not say how the samples of step {step} were "
            "chosen: the process was killed before it was written."
        )
    layout: Mapping[str, Any] = marks[-1]
    if "plan" not in layout:
        raise JournalError(
            f"step {step} has samples of a {layout['source']}, of which the journal has the place "
            f"alone: epoch {epoch}, in the order in which the dataset gives them."
        )
    return layout


def _batches(
    layout: Mapping[str, Any], epoch: int, begin: int, end: int, loader: Any
) -> list[list[list[Any]]]:
    """Return the indices of each micro-batch and rank between two positions."""
    sampler = _sampler(layout, loader)
    order = _order(layout, sampler, epoch)
    plans = [_plan(layout, rank) for rank in range(layout["world_size"])]
    shares = [plan.shares(order, layout["position"]) for plan in plans]
    position, batches = int(layout["position"]), []
    for of_ranks in zip(*shares, strict=True):
        if position >= end:
            break
        if position >= begin:
            batches.append([list(share.indices) for share in of_ranks])
        position += of_ranks[0].real
    return batches


def _plan(layout: Mapping[str, Any], rank: int) -> SamplePlan | BatchPlan:
    world, even = layout["world_size"], layout["even"]
    if layout["plan"] == "batches":
        return BatchPlan(rank, world, even, layout["split"], layout["batch_size"])
    return SamplePlan(layout["batch_size"], layout["drop_last"], rank, world, even)


def _order(layout: Mapping[str, Any], sampler: Any, epoch: int) -> Sequence[Any]:
    """Return all indices (or batches of them) of an epoch."""
    record, seed = layout["record"], layout["seed"]
    if record.get("seeded"):
        return epoch_order(sampler, seed, epoch)
    for part in with_inner(sampler):
        set_seed_and_epoch(part, seed, epoch)
    draws = Draws(sampler, record)
    if draws.differs:
        raise JournalError(
            f"{type(sampler).__name__} does not draw what it drew then: the script's sampler or "
            "dataset has changed."
        )
    return draws.take(None)


def _sampler(layout: Mapping[str, Any], loader: Any) -> Any:
    """Return a sampler like the one of the run."""
    described = layout["sampler"]
    kind, length = described["kind"], described["length"]
    if kind == "SequentialSampler":
        return range(length)
    if kind == "RandomSampler":
        own = torch.Generator(device="cpu") if described["own_generator"] else None
        return RandomSampler(range(length), described["replacement"], described["samples"], own)
    if kind == "SeedableRandomSampler":
        return SeedableRandomSampler(range(length), data_seed=layout["seed"])
    if not isinstance(loader, DataLoader):
        raise JournalError(
            f"the order came from a {kind}, of which the journal has the name alone: give the "
            "DataLoader of the script with --script FILE:NAME."
        )
    inner = loader.batch_sampler if layout["plan"] == "batches" else loader.sampler
    if type(inner).__name__ != kind:
        raise JournalError(f"the loader has a {type(inner).__name__}, and the run had a {kind}.")
    return inner
