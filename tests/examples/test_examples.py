"""The examples as a user starts them: alone, with accel launch, with torchrun."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
STARTERS = {
    "python": [sys.executable],
    "launch": [sys.executable, "-m", "accel_callbacks.cli", "launch", "--num_processes", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"],
}

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="compares runs on the CPU"),
]


def run(starter: str, example: str, *options: str) -> str:
    done = warm.run(
        [*STARTERS[starter], str(ROOT / "examples" / example), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, warm_children=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(printed: str) -> float:
    return max(float(number) for number in re.findall(r"([\d.]+)\s*%", printed))


@pytest.mark.first
def test_digits_is_the_same_under_both_launchers_and_learns(tmp_path):
    options = ["--epochs", "4", "--log_with", "jsonl", "--project_dir"]
    for starter in ("launch", "torchrun"):
        assert accuracy(run(starter, "digits.py", *options, str(tmp_path / starter))) > 95
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("launch", "torchrun")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    "starter",
    ["python", *(pytest.param(one, marks=pytest.mark.slow) for one in ("launch", "torchrun"))],
)
def test_the_plain_loop_learns_and_its_hooks_fire(starter):
    printed = run(starter, "plain_loop.py")
    assert accuracy(printed) > 90
    assert len(printed.strip().splitlines()) == 10 + 1  # each epoch once, and the hooks


def test_checkpoints_alone_goes_on_and_keeps_what_it_says(tmp_path):
    folder = ["--folder", str(tmp_path / "alone")]
    first = run("python", "checkpoints_alone.py", *folder)
    assert "begins with epoch 1\ncheckpoints: step-00000002 step-00000003\n" in first
    again = run("python", "checkpoints_alone.py", *folder, "--epochs", "6")
    assert "begins with epoch 5\ncheckpoints: step-00000004 step-00000005\n" in again
    assert again.endswith("first 8 rows are the model's: True\n")
