"""The batch files of examples/slurm, run by a stand-in for SLURM, with a worker that is lost."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.fake_slurm import put_tools

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "slurm"
SCRIPT = f"""
import runpy, sys
sys.argv += ["--epochs", "1", "--lose", "worker", "--lose_at", "37"]
runpy.run_path({str(ROOT / "examples" / "elastic.py")!r}, run_name="__main__")
"""
# Machines, tasks on each, further words, and how often it begins.
JOBS: dict[str, tuple[int, int, list[str], int]] = {
    "node_per_task.sbatch": (2, 1, [], 2),
    "gpu_per_task.sbatch": (1, 2, [], 1),  # it is not restarted, so the script loses nothing
    "elastic.sbatch": (2, 1, ["1:2"], 2),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", JOBS)
def test_a_batch_file_trains_to_the_end(name: str, tmp_path: Path) -> None:
    machines, tasks, words, begins = JOBS[name]
    tools = put_tools(tmp_path / "bin")
    (tmp_path / "train.py").write_text(SCRIPT)
    keep = ("ACCEL_", "TORCH", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "SLURM_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(keep)}
    env |= {"SLURM_JOB_ID": str(os.getpid() + len(name)), "SLURM_NNODES": str(machines)}
    env |= {"SLURM_JOB_NODELIST": ",".join(["localhost", "second"][:machines])}
    env |= {"SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_CPUS_PER_TASK": "1"}
    env |= {"ACCEL_CPU": "1", "OMP_NUM_THREADS": "1"}
    env |= {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(FOLDER / name), "train.py", "runs/here", *words],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(set(re.findall(r"^2 processes begin at step \d+$", done.stdout, re.M))) == begins
    assert "epoch 1: 1797 samples, each once: True" in done.stdout
    assert "done on 2 processes after 57 steps" in done.stdout
    assert (tmp_path / "runs" / "here" / "model" / "model.safetensors").is_file()


def test_each_file_is_tested_and_is_valid_bash() -> None:
    files = {file.name for file in FOLDER.iterdir()}
    assert files == set(JOBS)
    for name in files:
        subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)
        text = (FOLDER / name).read_text()
        assert text.startswith("#!/bin/bash\n")
        assert "\n\nset -eu\n" in text
