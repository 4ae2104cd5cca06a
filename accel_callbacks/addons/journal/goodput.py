"""Goodput: the part of a run's time that went into steps that count, and where the rest went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from accel_callbacks.addons.journal.format import SKIPPED
from accel_callbacks.addons.journal.reader import Attempt, Journal
from accel_callbacks.terminal_text import table

__all__ = ["Goodput", "energy_of"]

_PARTS = {
    "useful_s": "steps that count",
    "start_s": "from the start of the process to the first batch",
    "compile_s": "torch.compile",
    "data_s": "waiting for data",
    "save_s": "stopped for a save",
    "evaluation_s": "evaluations",
    "repeated_s": "steps taken again, or left out",
    "recovery_s": "from a failure to the first batch after it",
    "other_s": "after the last step",
}


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by what they were spent on, as rank 0 saw them; they add up to its time.

    Args:
        useful_s: in steps that count: taken, and not taken again later.
        start_s: from the start of the process to the first batch, where no failure came before.
        compile_s: in ``torch.compile``, as far as it happened in steps.
        data_s: waiting for data.
        save_s: stopped for saves.
        evaluation_s: in evaluations.
        repeated_s: in steps that a later attempt took again, or that were left out.
        recovery_s: from the last row of an attempt that failed to the first batch of the next.
        other_s: after the last step: end hooks and what the script did there.
        rank_s: seconds of the run times its ranks.

    Example:
        >>> from accel_callbacks.journal import Goodput
        >>> Goodput(useful_s=90.0, start_s=10.0, rank_s=200.0).share
        0.9
    """

    useful_s: float = 0.0
    start_s: float = 0.0
    compile_s: float = 0.0
    data_s: float = 0.0
    save_s: float = 0.0
    evaluation_s: float = 0.0
    repeated_s: float = 0.0
    recovery_s: float = 0.0
    other_s: float = 0.0
    rank_s: float = 0.0

    @classmethod
    def of(cls, journal: Journal) -> Goodput:
        """Return the goodput of all attempts of a run."""
        rows = journal.rows()
        parts = list(_parts(journal, rows))
        sums = {field.name: sum(part[field.name] for part in parts) for field in fields(cls)}
        return cls(**sums)

    @property
    def wall_s(self) -> float:
        """Seconds of the run, without pauses after an attempt that had succeeded."""
        return float(sum(getattr(self, name) for name in _PARTS))

    @property
    def share(self) -> float:
        """Useful part of the time, from 0 to 1."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0

    def cost(self, price: float) -> float:
        """Return what the run cost, at a price for an hour of one rank."""
        return self.rank_s / 3600 * price

    def metrics(self) -> dict[str, float]:
        """Return the values for trackers, named ``goodput/...``."""
        return {"goodput/share": self.share} | {
            f"goodput/{name}": getattr(self, name) for name in _PARTS
        }

    def describe(self) -> str:
        """Return a table of the parts."""
        lines = [
            (name.removesuffix("_s"), seconds, what)
            for name, what in _PARTS.items()
            if (seconds := getattr(self, name)) > 0 or name == "useful_s"
        ]
        rows = [(*_cells(seconds, self.wall_s), name, what) for name, seconds, what in lines]
        rows.append((*_cells(self.wall_s, self.wall_s), "sum", ""))
        return table(("SECONDS", "SHARE", "PART", ""), rows)


def energy_of(journal: Journal) -> dict[str, float]:
    """Return ``kwh`` and ``co2_kg`` of all attempts, as far as ``EnergyMonitor`` has noted them."""
    sums: dict[str, float] = {}
    for attempt in journal.attempts:
        marks = (mark for mark in attempt.marks_of("energy") if "kwh" in mark)
        newest = max(marks, key=lambda mark: float(mark["kwh"]), default={})
        for name in ("kwh", "co2_kg"):
            if newest.get(name) is not None:
                sums[name] = sums.get(name, 0.0) + float(newest[name])
    return sums


def _cells(seconds: float, whole: float) -> tuple[str, str]:
    share = seconds / whole * 100 if whole > 0 else 0.0
    return f"{seconds:9.1f}", f"{share:5.1f} %"


def _parts(journal: Journal, rows: np.ndarray[Any, Any]) -> Iterator[dict[str, float]]:
    """Yield the seconds of each attempt, with those between it and the one before."""
    before: float | None = None  # when the last attempt was heard of last
    failed = False
    for attempt in journal.attempts:
        start = attempt.start
        if not start:
            continue
        part = {field.name: 0.0 for field in fields(Goodput)}
        part |= _of_rows(attempt, rows[rows["attempt"] == attempt.number])
        trained = next((float(mark["time"]) for mark in attempt.marks_of("train")), None)
        end = next(attempt.marks_of("end"), None)
        times = [float(mark["time"]) for mark in attempt.marks]
        heard = max([*times, *rows["time"][rows["attempt"] == attempt.number].tolist()])
        began = float(start.get("process_began", start["time"]))
        if before is not None:
            began = before if failed else max(began, before)
        ready = heard if trained is None else trained
        part["recovery_s" if failed else "start_s"] += max(ready - began, 0.0)
        part["rank_s"] = max(heard - began, 0.0) * attempt.world_size
        yield part
        before, failed = heard, end is None or end.get("status") != "success"


def _of_rows(attempt: Attempt, rows: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return the seconds from the first batch of an attempt on."""
    counts = ~rows["repeated"] & (rows["flags"] & SKIPPED == 0)
    names = ("data_s", "save_s", "evaluation_s", "step_s")
    sums = {name: float(rows[name][counts].sum(dtype=np.float64)) for name in names}
    lost = sum(float(rows[name][~counts].sum(dtype=np.float64)) for name in names)
    compiled = max((float(mark["seconds"]) for mark in attempt.marks_of("compile")), default=0.0)
    compiled = min(compiled, sums["step_s"])
    useful = sums.pop("step_s") - compiled
    parts = {**sums, "useful_s": useful, "compile_s": compiled, "repeated_s": lost}
    trained = next((float(mark["time"]) for mark in attempt.marks_of("train")), None)
    last = float(rows["time"][-1]) if len(rows) else trained
    end = next(attempt.marks_of("end"), None)
    if end is None or last is None:
        return parts
    left = max(float(end["time"]) - last, 0.0)
    for name in ("data_s", "save_s", "evaluation_s"):
        # Those of the whole attempt, without those that rows have.
        spent = float(end.get(name, 0.0)) - float(rows[name].sum(dtype=np.float64))
        spent = min(max(spent, 0.0), left)
        parts[name] += spent
        left -= spent
    parts["other_s"] = left
    return parts
