"""Programs that import accelerate, or a package that does: on this library as on Accelerate."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="scripts/test_compat has it"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).with_name("programs")
SHARED = {"language", "outcome", "problem"}
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)
ONLY_ON_TWO = {"trainer_sharded"}
ON_TWO = [
    *("accumulation_of_tokens", "checkpointing", "communication_hook", "early_stopping"),
    *("local_sgd", "metrics", "peft_lora", "sentence_encoder", "trainer_sharded"),
    *("trl_preferences", "trl_sft"),
]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = ("-m", "accel_callbacks.cli", "launch", "--cpu", "--num_processes", "2")


def outcome(folder: Path, *command: str) -> dict[str, Any]:
    """Return what a program prints as its last line."""
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"},
        **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    }
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *command, str(folder)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def skip_without_its_packages(name: str) -> None:
    """Skip if what a program imports is not installed."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    froms = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for module in froms:
        package = (module or "").partition(".")[0]
        if package not in SHARED and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; scripts/test_compat has it")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ONLY_ON_TWO])
def test_a_program_ends_as_on_accelerate(name, tmp_path):
    skip_without_its_packages(name)
    script = str(FOLDER / f"{name}.py")
    there = outcome(tmp_path / "there", script)
    assert outcome(tmp_path / "here", "-m", "accel_callbacks.as_accelerate", script) == there


@pytest.mark.distributed
@pytest.mark.parametrize("name", ON_TWO)
def test_a_program_on_two_processes_ends_as_on_accelerate(name, tmp_path):
    skip_without_its_packages(name)
    script = str(FOLDER / f"{name}.py")
    there = outcome(tmp_path / "there", *TORCHRUN, script)
    assert outcome(tmp_path / "here", *LAUNCH, "--as_accelerate", script) == there
