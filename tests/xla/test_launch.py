"""Launches that compute through torch_xla."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_callbacks import Accelerator, notebook_launcher

EXAMPLE = Path(__file__).parents[2] / "examples" / "by_feature" / "train_on_a_tpu.py"
SCRIPT = """
import sys
import torch
from accel_callbacks import Accelerator
def train():
    accel = Accelerator()
    model = accel.prepare(torch.nn.Linear(2, 2))
    print(accel.device, accel.distributed_type.value, accel.num_processes, *sys.argv[1:])
"""
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: XLA
downcast_bf16: 'no'
machine_rank: 0
main_training_function: train
mixed_precision: bf16
num_machines: 1
num_processes: 8
use_cpu: false
"""


def launch(folder: Path, *words: str) -> str:
    """Launch the script, and return what it prints."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "accel_callbacks.cli", "launch", *words, "train.py", "--lr"]
    return subprocess.check_output(command, cwd=folder, env=os.environ, text=True)


@pytest.mark.parametrize(
    "words",
    [("--tpu", "--main_training_function", "train"), ("--config_file", "config.yaml")],
    ids=["tpu", "config_file"],
)
def test_a_launch_on_a_tpu_computes_through_xla(words: tuple[str, ...], tmp_path: Path) -> None:
    assert launch(tmp_path, *words).splitlines()[-1] == "xla:0 XLA 1 --lr"


def test_a_notebook_calls_the_function_here() -> None:
    def train(word: str) -> tuple[str, str, int]:
        return word, Accelerator().device.type, os.getpid()

    assert notebook_launcher(train, ("a",), num_processes=8) == [("a", "xla", os.getpid())]
    with pytest.raises(ValueError, match="num_nodes=2"):
        notebook_launcher(train, ("a",), num_nodes=2)


@pytest.mark.parametrize(
    ("words", "count"),
    [(("--tpu",), 9), (("--config_file", "config.yaml", "--checks", "processes"), 1)],
    ids=["tpu", "config_file"],
)
def test_checks_of_an_installation_hold(words: tuple[str, ...], count: int, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "accel_callbacks.cli", "test", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{count} checks hold"


def test_a_script_without_a_function_runs_as_it_is(tmp_path: Path) -> None:
    words = ["launch", "--tpu", str(EXAMPLE), "--shard", "--epochs", "3"]
    command = [sys.executable, "-m", "accel_callbacks.cli", *words]
    alone = [sys.executable, str(EXAMPLE), "--shard", "--epochs", "3"]
    launched, started = (
        subprocess.check_output(each, cwd=tmp_path, text=True) for each in (command, alone)
    )
    assert launched == started
    accuracy, device = re.findall(r"accuracy ([0-9.]+)% on (.*)", launched)[0]
    assert float(accuracy) > 95
    assert device == "xla:0"
