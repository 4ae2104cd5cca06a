"""Orders of samples and saved states: the same on this library and on Accelerate."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="scripts/test_adapters has it"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).with_name("parity_cases.py"))
HERE = ("-m", "accel_callbacks.as_accelerate")
LAUNCH = ("-m", "accel_callbacks.cli", "launch", "--cpu", "--num_processes", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def result(*command: str) -> list[object]:
    """Return what a script prints at its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed: list[object] = json.loads(done.stdout.splitlines()[-1])
    return printed


@pytest.mark.slow
def test_orders_of_one_process():
    assert result(*HERE, SCRIPT, "orders") == result(SCRIPT, "orders")


@pytest.mark.distributed
def test_orders_of_two_processes():
    here = result(*LAUNCH, "--as_accelerate", SCRIPT, "orders")
    assert here == result(*TORCHRUN, SCRIPT, "orders")


def test_a_state_that_accelerate_saved_is_gone_on_from(tmp_path):
    whole = result(SCRIPT, "save", str(tmp_path / "state"))
    assert result(*HERE, SCRIPT, "load", str(tmp_path / "state")) == whole
