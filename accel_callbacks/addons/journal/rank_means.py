"""Means of the steps of each rank, with how long it waited for the slowest one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from accel_callbacks.addons.journal.reader import Journal

__all__ = ["RankMeans", "rank_means"]


class RankMeans(NamedTuple):
    """Mean seconds of a rank's steps.

    Args:
        rank: the rank.
        step: its last one.
        step_s: of a step, in which ranks wait for each other.
        data_s: waiting for data before it.
        own_s: waiting for data and computing, before the rank met the others.
        wait_s: by which the slowest rank of each step met them later.
    """

    rank: int
    step: int
    step_s: float
    data_s: float
    own_s: float
    wait_s: float


def rank_means(journal: Journal, recent: int | None = None) -> list[RankMeans]:
    """Return the means of each rank that has rows.

    Args:
        journal: of the run.
        recent: rows of the newest attempt to look at; all rows of all attempts if ``None``.
    """
    attempts = journal.attempts if recent is None else journal.attempts[-1:]
    rows = {}
    for rank in sorted({rank for attempt in attempts for rank in attempt.files}):
        rows[rank] = journal.rows(rank, repeated=False)[-(recent or 0) :]
    rows = {rank: part for rank, part in rows.items() if len(part)}
    if not rows:
        return []
    steps, places = np.unique(
        np.concatenate([part["step"] for part in rows.values()]), return_inverse=True
    )
    own = {rank: part["data_s"].astype(float) + part["forward_s"] for rank, part in rows.items()}
    slowest = np.zeros(len(steps))
    np.maximum.at(slowest, places, np.concatenate(list(own.values())))
    return [
        RankMeans(
            rank=rank,
            step=int(part["step"][-1]),
            step_s=float(part["step_s"].mean(dtype=float)),
            data_s=float(part["data_s"].mean(dtype=float)),
            own_s=float(own[rank].mean()),
            wait_s=float((slowest[np.searchsorted(steps, part["step"])] - own[rank]).mean()),
        )
        for rank, part in rows.items()
    ]
