"""examples/digits.py, killed with SIGKILL in the middle of an epoch and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loggers import read_jsonl
from tests.support import warm

ROOT = Path(__file__).resolve().parents[3]
STEPS_PER_EPOCH = {1: 45, 2: 23}
EPOCHS = 3

pytestmark = [pytest.mark.distributed]


def command(processes: int, folder: Path) -> list[str]:
    script = [str(ROOT / "examples" / "digits.py"), "--project_dir", str(folder)]
    options = ["--epochs", str(EPOCHS), "--every_n_steps", "7", "--log_with", "jsonl"]
    if processes == 1:
        return [sys.executable, *script, "--cpu", *options]
    launch = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--cpu"]
    return [*launch, "--num_processes", str(processes), *script, *options]


def start(processes: int, folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "ab") as log:
        return warm.Popen(
            command(processes, folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            warm_children=True,
        )


def finish(processes: int, folder: Path) -> str:
    process = start(processes, folder)
    assert process.wait() == 0, (folder / "log").read_text()
    return (folder / "log").read_text()


def kill_in_second_epoch(processes: int, folder: Path) -> int:
    """SIGKILL to all processes once a step of the second epoch was logged; returns that step."""
    process = start(processes, folder)
    target = STEPS_PER_EPOCH[processes] + 9
    while (step := last_step(folder / "metrics.jsonl")) < target:
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.01)
    for pid in family(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return step


def family(root: int) -> list[int]:
    """A process and all that descend from it; the launcher gives workers sessions of their own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def last_step(path: Path) -> int:
    if not path.exists():
        return 0
    lines = path.read_text().splitlines()
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["type"] == "metrics":
            return int(record["step"])
    return 0


@pytest.mark.first
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_run_resumes_by_itself_and_ends_with_the_same_weights(tmp_path, processes):
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc to find the workers")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(processes, whole)
    step = kill_in_second_epoch(processes, killed)
    assert not (killed / "model").exists()
    log = finish(processes, killed)

    resumed_at = int(log.split("resumed from ")[1].split("(step ")[1].split(",")[0])
    assert 0 < resumed_at <= step + 7
    assert resumed_at % STEPS_PER_EPOCH[processes] != 0, "the kill was not inside an epoch"
    weights = [folder / "model" / "model.safetensors" for folder in (whole, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    histories = [
        {row["step"]: row["values"] for row in read_jsonl(folder / "metrics.jsonl")}
        for folder in (whole, killed)
    ]
    assert histories[0] == histories[1]
    assert max(histories[0]) == EPOCHS * STEPS_PER_EPOCH[processes]
