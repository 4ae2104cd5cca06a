"""The runs below a folder: what each was started with, how far it came, and how it is."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel_callbacks.addons.journal.format import SKIPPED, JournalError
from accel_callbacks.addons.journal.goodput import Goodput
from accel_callbacks.addons.journal.metrics import metrics_of, project_of
from accel_callbacks.addons.journal.reader import Journal
from accel_callbacks.addons.journal.state import state_of
from checkpoint_io.local_files import base_name, local_path, split_path
from loggers import flat_config

__all__ = ["RunSummary", "differing_settings", "journal_folders", "summary_of"]

_DEPTH = 3  # folders between the one that is searched and the project of a run
_ATTEMPT = "attempt-*"


@dataclass(frozen=True)
class RunSummary:
    """One line about a run.

    Args:
        folder: of its journal.
        project: its project folder, None if the journal was copied out of it.
        run_id: of the run.
        state: running, ended, failed, interrupted, killed, unknown; or damaged, and where its files
            cannot be read: unreachable in a store, unreadable on a disk.
        name: of the run.
        attempts: how often it was started.
        steps: optimizer steps that count.
        began: when its newest attempt began, in Unix seconds.
        wall_s: seconds that it took.
        goodput: useful part of them, from 0 to 1.
        best: best value of the metric, None if it has none.
        best_step: at which step that was.
        config: settings by their dotted names.
        problem: why the journal cannot be read.
        unguarded: folders in which the run could have no lease, and why.
    """

    folder: str
    project: str | None
    run_id: str
    state: str
    name: str = ""
    attempts: int = 0
    steps: int = 0
    began: float = 0.0
    wall_s: float = 0.0
    goodput: float = 0.0
    best: float | None = None
    best_step: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    unguarded: Mapping[str, str] = field(default_factory=dict)


def journal_folders(folder: str) -> list[str]:
    """Return the folders of the journals of all runs below a folder, sorted.

    Args:
        folder: a project folder, or one with project folders in it, path or URL.
    """
    local = local_path(folder)
    patterns = [(*["*"] * depth, "journal", "*") for depth in range(_DEPTH + 1)]
    patterns += [("*",), ()]  # a folder `journal`, and that of one run
    found: set[str] = set()
    if local is not None:
        for names in patterns:
            files = glob.glob(os.path.join(glob.escape(local), *names, _ATTEMPT))
            found |= {os.path.dirname(file) for file in files}
        return sorted(found)
    from loggers.trackers.line_file import list_names, reaching

    with suppress(FileNotFoundError, NotADirectoryError):
        list_names(folder)  # a search passes over what it cannot list
    with reaching(folder) as (fs, key):
        for names in patterns:
            urls = map(fs.unstrip_protocol, fs.glob("/".join((key.rstrip("/"), *names, _ATTEMPT))))
            found |= {split_path(url)[0].rstrip("/") for url in urls}
    return sorted(found)


def summary_of(folder: str, metric: str = "loss", highest: bool = False) -> RunSummary:
    """Return the summary of the run whose journal is in a folder.

    Args:
        folder: of the journal.
        metric: whose best value is told: ``loss`` of the journal, or one that the JSONL tracker
            has written.
        highest: the highest value is the best, not the lowest.
    """
    try:
        return _summary(Journal(folder, Journal.read(folder).attempts), metric, highest)
    except JournalError as error:
        state, problem = "damaged", str(error)
    except OSError as error:
        state, problem = "unreachable" if local_path(folder) is None else "unreadable", str(error)
    return RunSummary(folder, None, base_name(folder), state, problem=problem)


def _summary(journal: Journal, metric: str, highest: bool) -> RunSummary:
    goodput, rows = Goodput.of(journal), journal.rows(repeated=False)
    taken = rows[rows["flags"] & SKIPPED == 0]
    best, best_step = _best(journal, taken, metric, highest)
    newest = journal.attempts[-1].start
    return RunSummary(
        journal.folder,
        project_of(journal),
        base_name(journal.folder),
        state_of(journal),
        journal.name,
        len(journal.attempts),
        int(taken["step"].max()) if len(taken) else 0,
        float(newest.get("time", 0.0)),
        goodput.wall_s,
        goodput.share,
        best,
        best_step,
        flat_config(newest.get("config") or {}),
        unguarded={
            mark["folder"]: mark["problem"]
            for attempt in journal.attempts
            for mark in attempt.marks_of("unguarded")
        },
    )


def _best(
    journal: Journal, rows: np.ndarray[Any, Any], metric: str, highest: bool
) -> tuple[float | None, int | None]:
    """Return the best finite value of a metric, and its step."""
    logged = metrics_of(journal)
    if metric in logged:
        steps, values = np.array(logged[metric][0]), np.array(logged[metric][2])
    elif metric == "loss":
        steps, values = rows["step"], rows["loss"]
    else:
        return None, None
    finite = np.isfinite(values)
    if not finite.any():
        return None, None
    steps, values = steps[finite], values[finite]
    place = int(values.argmax() if highest else values.argmin())
    return float(values[place]), int(steps[place])


def differing_settings(runs: Sequence[RunSummary]) -> list[str]:
    """Return the names of the settings of which two runs have different values, sorted."""
    readable = [run.config for run in runs if not run.problem]
    names = sorted({name for config in readable for name in config})
    absent = object()
    return [
        name
        for name in names
        if any(config.get(name, absent) != readable[0].get(name, absent) for config in readable)
    ]
