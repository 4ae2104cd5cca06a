"""The commands of the documentation for schedulers, in the environments that these make."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accel_callbacks.distributed.topology import _ranks_from
from tests.cli.conftest import clean_environment

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "launch-anywhere.md"

# What each scheduler sets on the second of two machines with two processes each.
SECOND = {
    "Kubeflow Trainer": {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29400",
    },
    "A JobSet": {"JOB_COMPLETION_INDEX": "1"},
    "SageMaker": {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"},
    "SkyPilot": {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    },
    "dstack": {
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": "1",
        "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    },
}
MAIN = {
    "Kubeflow Trainer": "job-node-0-0.job",
    "A JobSet": "train-workers-0-0.train",
    "SageMaker": "algo-1",
}


def commands() -> dict[str, str]:
    """Return the commands of the page, by the first words of the comment above each."""
    block = next(
        block for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S) if "SM_" in block
    )
    parts = re.findall(r"^# (.*?)\n(.*?)(?=^# |\Z)", block, re.S | re.M)
    return {re.split(r"[,\"]", title)[0].strip(): command for title, command in parts}


@pytest.mark.skipif(sys.platform == "win32", reason="the commands are for bash")
@pytest.mark.parametrize("scheduler", SECOND)
def test_a_scheduler_places_the_second_machine(scheduler: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    accel = shlex.join(
        [sys.executable, "-m", "accel_callbacks.cli", "launch", "--dry_run", "--cpu"]
    )
    command = commands()[scheduler].replace("accel launch", accel, 1)
    command = command.replace("--nproc_per_node gpu", "--nproc_per_node 2")
    environment = {**clean_environment(tmp_path), **SECOND[scheduler]}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    port = SECOND[scheduler].get("PET_MASTER_PORT", "29500")
    address = MAIN.get(scheduler, "10.0.0.1")
    for words in ("--nnodes 2", "--nproc-per-node 2", "--node-rank 1"):
        assert words in done.stdout
    for rank in (2, 3):
        assert (
            f"# rank {rank}: RANK={rank} WORLD_SIZE=4 LOCAL_RANK={rank - 2} LOCAL_WORLD_SIZE=2 "
            f"MASTER_ADDR={address} MASTER_PORT={port}"
        ) in done.stdout


def test_the_page_has_a_command_for_each() -> None:
    assert set(commands()) == set(SECOND)


def test_ranks_of_those_that_start_each_process() -> None:
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert _ranks_from({**pod, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == (1, 2, 0, 1)
    assert "LOCAL_RANK=0" in PAGE.read_text()
    assert "LOCAL_WORLD_SIZE=1" in PAGE.read_text()
    ray = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert _ranks_from({**ray, "NODE_RANK": "1"}) == (3, 4, 1, 2)
