"""Journals of runs that never were: what a reader of journals sees is chosen by the test."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from accel_callbacks.addons.journal.format import SKIPPED, UNKNOWN, Header, pack_header, pack_row


def write_run(
    project: Path,
    steps: Iterable[int] = range(1, 4),
    *,
    run_id: str = "a1",
    **options: Any,
) -> None:
    """Write the journal of a run of one attempt into its project folder."""
    write_attempt(project / "journal" / run_id, 1, steps, **options)


def write_attempt(
    journal: Path,
    attempt: int,
    steps: Iterable[int],
    *,
    name: str = "demo",
    time: float = 1000.0,
    step: int = 0,
    ranks: int = 1,
    config: Any = None,
    marks: Sequence[dict[str, Any]] = (),
    loss: Callable[[int], float] = lambda step: 1 / step,
    gradient_norm: Callable[[int], float] = lambda step: math.nan,
    learning_rate: Callable[[int], float] = lambda step: 0.1,
    step_s: Callable[[int], float] = lambda rank: 1.0,
    forward_s: Callable[[int], float] = lambda rank: 0.0,
    left_out: Collection[int] = (),
) -> None:
    """Write an attempt: a row a second for each step, and its marks.

    Args:
        journal: folder of the run's journal.
        attempt: number of the attempt.
        steps: of its rows.
        name: of the run.
        time: of its start.
        step: at which it starts.
        ranks: number of ranks.
        config: of the run.
        marks: after the one of the start.
        loss: of a step.
        gradient_norm: of a step.
        learning_rate: of a step.
        step_s: seconds of a step of a rank.
        forward_s: those of it before the backward.
        left_out: steps that the optimizer did not take.
    """
    journal.mkdir(parents=True, exist_ok=True)
    start = {"kind": "start", "time": time, "attempt": attempt, "name": name, "step": step}
    start |= {"resumed_from": f"checkpoints/{step}" if step else None, "config": config}
    lines = "".join(json.dumps(mark) + "\n" for mark in [start, *marks])
    (journal / f"attempt-{attempt:04}.jsonl").write_text(lines, encoding="utf-8")
    steps = list(steps)
    for rank in range(ranks):
        header = pack_header(Header(rank, ranks, attempt, time, journal.name))
        rows = [
            pack_row(
                (
                    *(number, 0, index, UNKNOWN, loss(number), gradient_norm(number)),
                    *(learning_rate(number), time + index, 0, 0, 0, 0, 0.0, 0.0, 0.0),
                    *(step_s(rank), forward_s(rank), 1, SKIPPED if number in left_out else 0),
                )
            )
            for index, number in enumerate(steps, start=1)
        ]
        (journal / f"attempt-{attempt:04}-rank-{rank:05}.rows").write_bytes(header + b"".join(rows))
