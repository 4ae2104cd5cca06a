"""The page of a report: what is told of each run, as JSON in one HTML file with its scripts."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from typing import Any

import numpy as np

from accel_callbacks.addons.journal.format import ROUTINE, SKIPPED
from accel_callbacks.addons.journal.goodput import Goodput
from accel_callbacks.addons.journal.metrics import metrics_of, project_of
from accel_callbacks.addons.journal.rank_means import rank_means
from accel_callbacks.addons.journal.reader import Attempt, Journal
from accel_callbacks.addons.journal.report.curves import curve_of
from accel_callbacks.addons.journal.report.media import pictures_of, tables_of
from checkpoint_io.local_files import base_name
from loggers import flat_config

__all__ = ["page_of", "report_page", "run_facts"]

_BUCKETS = 2000
_METRIC_BUCKETS = 500  # of each metric of a tracker: there may be hundreds
_MOST_MARKS = 500  # of a kind
_COLUMNS = {
    "loss": "loss",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "step_s": "seconds a step",
}
# Marks that are no event of the run for a reader, or are told in another way.
_TEXTS = ("reason", "error", "path", "command")
_LABELS = {"save": "checkpoint", "lost_rank": "lost rank"}


def report_page(journals: Sequence[Journal]) -> str:
    """Return the HTML of a page about runs, which loads nothing from elsewhere.

    Raises:
        JournalError: a file of a journal is damaged.
    """
    return page_of(journals, [run_facts(journal) for journal in journals])


def page_of(journals: Sequence[Journal], runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the page about runs of which the facts are known."""
    labels = _labels(journals)
    runs = [{"label": label, **facts} for label, facts in zip(labels, runs, strict=True)]
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts = {"written": written, "runs": runs, "charts": list(_COLUMNS.values())}
    # "<" would let a text of the run close the script that it is in.
    data = json.dumps(facts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    folder = files(__package__)
    parts = {
        "title": html.escape(", ".join(labels)),
        "style": _text(folder, "uplot/uPlot.min.css") + _text(folder, "page.css"),
        "license": _text(folder, "uplot/LICENSE"),
        "uplot": _text(folder, "uplot/uPlot.iife.min.js"),
        "script": _text(folder, "page.js"),
        "data": data,
    }
    # In one pass: a text of the run that looks like a place of the page stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _text(folder, "page.html"))


def _text(folder: Any, name: str) -> str:
    return str(folder.joinpath(name).read_text(encoding="utf-8"))


def _labels(journals: Sequence[Journal]) -> list[str]:
    """Return a label for each run: its name, and what tells it from others of that name."""
    names = [journal.name or base_name(journal.folder) for journal in journals]
    projects = [base_name(project_of(journal) or journal.folder) for journal in journals]
    pairs = list(zip(names, projects, strict=True))
    return [
        name
        if names.count(name) == 1
        else f"{name} ({project if pairs.count((name, project)) == 1 else run_id})"
        for (name, project), run_id in zip(
            pairs, (base_name(journal.folder) for journal in journals), strict=True
        )
    ]


def run_facts(journal: Journal) -> dict[str, Any]:
    """Return what the page tells of a run.

    Raises:
        JournalError: a file of its journal is damaged.
    """
    rows = journal.rows()
    goodput = Goodput.of(journal)
    began = _began(journal, rows)
    newest = journal.attempts[-1]
    return {
        "folder": journal.folder,
        "began": began,
        "attempts": [_attempt(attempt, rows) for attempt in journal.attempts],
        "curves": _curves(journal, rows, began),
        "marks": _thin_out(_marks(journal, rows, began)),
        "goodput": {
            name.removesuffix("_s"): round(seconds, 3)
            for name, seconds in vars(goodput).items()
            if name != "rank_s"
        },
        "share": goodput.share,
        "ranks": _ranks(journal),
        "pictures": pictures_of(journal),
        "tables": tables_of(journal),
        "config": _texts({"config": newest.start.get("config") or {}}),
        "environment": _environment(newest),
    }


def _began(journal: Journal, rows: np.ndarray[Any, Any]) -> float:
    """Return when the run began, in Unix seconds."""
    times = [float(mark["time"]) for mark in journal.marks if "time" in mark]
    return min([*times, *rows["time"][:1].tolist()], default=0.0)


def _attempt(attempt: Attempt, rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return a row of the table of attempts."""
    part = rows[rows["attempt"] == attempt.number]
    end = next(attempt.marks_of("end"), None)
    bad = part["step"][~np.isfinite(part["loss"]) & (part["micro_batches"] > 0)]
    return {
        "number": attempt.number,
        "ranks": attempt.world_size,
        "steps": [int(part["step"][0]), int(part["step"][-1])] if len(part) else None,
        "repeated": int(part["repeated"].sum()),
        "skipped": int((part["flags"] & SKIPPED > 0).sum()),
        "bad": len(bad),
        "status": None if end is None else str(end.get("status")),
    }


def _curves(
    journal: Journal, rows: np.ndarray[Any, Any], began: float
) -> dict[str, dict[str, list[Any]]]:
    """Return the curves of the journal, then those of the tracker's file of JSON lines."""
    taken = rows[~rows["repeated"] & (rows["flags"] & SKIPPED == 0)]
    times = taken["time"] - began
    curves = {
        title: curve_of(taken["step"], times, taken[column].astype(np.float64), _BUCKETS)
        for column, title in _COLUMNS.items()
    }
    for name, (steps, seconds, values) in metrics_of(journal).items():
        curves.setdefault(
            name,
            curve_of(np.array(steps), np.array(seconds) - began, np.array(values), _METRIC_BUCKETS),
        )
    return {name: curve for name, curve in curves.items() if curve is not None}


def _marks(journal: Journal, rows: np.ndarray[Any, Any], began: float) -> Iterator[dict[str, Any]]:
    """Yield what happened to the run, in order: kind, step, seconds since its start, text."""
    for attempt in journal.attempts:
        step = int(attempt.start.get("step", 0))
        if attempt.number > 1 and attempt.start:
            source = attempt.start.get("resumed_from")
            yield _mark("resume", step, float(attempt.start["time"]) - began, source)
        for mark in attempt.marks:
            kind = str(mark.get("kind"))
            if kind not in ROUTINE and kind != "end" and "step" in mark and "time" in mark:
                text = next((mark[key] for key in _TEXTS if key in mark), None)
                # A rollback says what it was about, such as a spike.
                label = str(mark.get("cause") or _LABELS.get(kind, kind))
                yield _mark(label, int(mark["step"]), float(mark["time"]) - began, text)
        part = rows[rows["attempt"] == attempt.number]
        end = next(attempt.marks_of("end"), None)
        if end is not None:
            if end.get("error"):
                yield _mark("failure", int(end["step"]), float(end["time"]) - began, end["error"])
        elif attempt is not journal.attempts[-1]:
            heard = [float(mark["time"]) for mark in attempt.marks if "time" in mark]
            times = [*heard, *part["time"][-1:].tolist()]
            step = int(part["step"][-1]) if len(part) else step
            yield _mark("kill", step, max(times, default=began) - began, "ended without a word")


def _mark(kind: str, step: int, seconds: float, text: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "step": step,
        "time": round(seconds, 3),
        "text": "" if text is None else str(text),
    }


def _thin_out(marks: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return marks without the most of those kinds that would fill the axis."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for mark in marks:
        kinds.setdefault(mark["kind"], []).append(mark)
    return [mark for group in kinds.values() for mark in group[:: -(-len(group) // _MOST_MARKS)]]


def _ranks(journal: Journal) -> list[dict[str, Any]]:
    """Return the means of each rank's steps, where there are several."""
    means = [part._asdict() for part in rank_means(journal)]
    return means if len(means) > 1 else []


def _environment(attempt: Attempt) -> dict[str, str]:
    """Return what beside the config may explain a difference between runs."""
    start = attempt.start
    settings = {
        "ranks": attempt.world_size,
        "command": " ".join(map(str, start.get("argv") or [])),
        "commit": start.get("git") or {},
        "versions": start.get("versions") or {},
        "devices": (start.get("hardware") or {}).get("devices") or [],
        "host": (start.get("hardware") or {}).get("host"),
    }
    return _texts(settings)


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves of nested settings as text, by their path."""
    return {path: str(leaf) for path, leaf in flat_config(settings).items()}
