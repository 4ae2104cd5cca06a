"""The metrics of a run, from the file of the JSONL tracker beside its journal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accel_callbacks.addons.journal.reader import Journal
from checkpoint_io.local_files import base_name, split_path
from loggers import read_jsonl

__all__ = ["metrics_of", "project_of", "records_of"]

_LARGEST = 1 << 1023  # integer that is a float


def project_of(journal: Journal) -> str | None:
    """Return the project folder of a run, ``None`` if its journal was copied out of it."""
    project, parent = split_path(split_path(journal.folder)[0])
    return project if parent == "journal" else None


def records_of(journal: Journal, kind: str = "metrics") -> Iterator[dict[str, Any]]:
    """Yield the records of a run in ``metrics.jsonl`` of its project, none without that file.

    Args:
        journal: of the run.
        kind: the type of the records, as for :func:`loggers.read_jsonl`.
    """
    project = project_of(journal)
    if project is not None:
        try:
            file, run_id = f"{project}metrics.jsonl", base_name(journal.folder)
            yield from read_jsonl(file, run_id=run_id, kind=kind)
        except FileNotFoundError:
            return


def metrics_of(journal: Journal) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """Return the steps, times and values of each metric of a run."""
    metrics: dict[str, tuple[list[int], list[float], list[float]]] = {}
    for record in records_of(journal):
        for name, value in record["values"].items():
            if isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST):
                steps, times, values = metrics.setdefault(name, ([], [], []))
                steps.append(int(record["step"]))
                times.append(float(record.get("time", 0.0)))
                values.append(float(value))
    return metrics
