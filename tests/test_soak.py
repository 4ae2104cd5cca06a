"""A long run holds as much at its end as at its beginning."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loggers import read_csv, read_jsonl

ROOT = Path(__file__).resolve().parent.parent


def soak(folder: Path, steps: int, samples: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The samples of a run in a process of its own, and what its trackers say of themselves."""
    size = [f"--steps={steps}", f"--samples={samples}"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.soak", str(folder), *size],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *taken, ended = map(json.loads, done.stdout.splitlines())
    return taken, ended["trackers"]


def part(taken: list[dict[str, Any]], name: str, number: int, of: int = 3) -> list[float]:
    """One of the equal parts of the samples."""
    values = [one[name] for one in taken]
    return values[len(values) * (number - 1) // of : len(values) * number // of]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("steps", "samples", "mib"),
    [
        (400, 8, 16.0),
        pytest.param(50_000, 50, 6.0, marks=pytest.mark.slow),
    ],
)
def test_a_long_run_neither_grows_nor_loses_a_row(
    steps: int, samples: int, mib: float, tmp_path: Path
) -> None:
    taken, trackers = soak(tmp_path, steps, samples)
    assert len(taken) == samples
    # Threads and descriptors: at the end as many as at any time after the first checkpoints.
    for name in ("threads", "python_threads", "descriptors"):
        assert max(part(taken, name, 3)) <= max(part(taken, name, 2)), name
    # Three checkpoints of the callback and the best one, and two of the loop.
    files = part(taken, "checkpoint_files", 2) + part(taken, "checkpoint_files", 3)
    assert max(files) <= 6 * 5
    # Medians, because allocators give memory back and take it again.
    grown = statistics.median(part(taken, "rss_mib", 3)) - statistics.median(
        part(taken, "rss_mib", 2)
    )
    assert grown < mib
    # Some of the manifests that a folder remembers come and go with the moment of the sample.
    most = statistics.median(part(taken, "objects", 2)) + 800
    assert statistics.median(part(taken, "objects", 3)) < most
    epochs = -(-steps // 200)
    for report in trackers.values():
        assert (report["dropped"], report["failures"]) == (0, 0)
    for rows in (read_jsonl(tmp_path / "metrics.jsonl"), read_csv(tmp_path / "metrics.csv")):
        losses = [row["step"] for row in rows if "train/loss" in row["values"]]
        assert losses == list(range(1, 200 * epochs + 1))
        assert sum("val/loss" in row["values"] for row in rows) == epochs
