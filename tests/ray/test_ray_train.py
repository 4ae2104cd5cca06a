"""Ray Train restarts a job that lost a worker, and the run goes on; `scripts/test_ray` has Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]
# Ray listens on the machine's own address too: here it has loopback alone.
ALONE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def run_job(folder: Path, *words: str) -> None:
    folder.mkdir()
    command = [sys.executable, "-m", "tests.ray.job", str(folder), *words]
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*(ALONE if shutil.which("unshare") else []), *command],
        cwd=ROOT,
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_killed_worker_costs_the_steps_since_the_last_save(tmp_path: Path) -> None:
    run_job(tmp_path / "unbroken")
    run_job(tmp_path / "killed", "--kill")
    for rank in range(2):
        assert (tmp_path / "unbroken" / f"starts-{rank}").read_text() == "0 of 2\n"
        assert (tmp_path / "killed" / f"starts-{rank}").read_text() == "0 of 2\n10 of 2\n"
    unbroken, resumed = (
        torch.load(tmp_path / name / "weights.pt") for name in ("unbroken", "killed")
    )
    assert unbroken.keys() == resumed.keys()
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
