"""The Trainer of transformers on this library and on Accelerate: the same weights, bit by bit."""

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
SCRIPT = Path(__file__).with_name("trainer_cases.py")


def results(*command: str) -> dict[str, list[object]]:
    """Return what each case ended with: a digest of the weights, the loss, the steps."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return {name: values for name, *values in map(json.loads, lines)}


@pytest.mark.slow
def test_one_process_ends_with_the_same_weights():
    here = results("-m", "accel_callbacks.as_accelerate", str(SCRIPT))
    assert len(here) == 11
    assert here == results(str(SCRIPT))


@pytest.mark.distributed
def test_two_processes_end_with_the_same_weights():
    cases = [str(SCRIPT), "plain", "accumulation", "evaluation"]
    launch = ("launch", "--cpu", "--num_processes", "2")
    here = results("-m", "accel_callbacks.cli", *launch, "--as_accelerate", *cases)
    assert len(here) == 3
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert here == results(*torchrun, *cases)
