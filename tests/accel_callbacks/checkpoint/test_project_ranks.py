"""Checkpoints that save_state names itself, on two processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, ProjectConfiguration
from tests.support import warm
from tests.support.bound import BOUND
from tests.support.ports import free_port

pytestmark = pytest.mark.distributed


def project(folder: str, **options):
    config = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)
    torch.manual_seed(0)
    accel = Accelerator(cpu=True, timeout=BOUND, project_config=config)
    return accel, accel.prepare(torch.nn.Linear(2, 1))


def saves(folder: str, times: int, background: bool) -> list:
    accel, _ = project(folder, total_limit=2)
    paths = []
    for number in range(times):
        accel.bare_models[0].weight.data.fill_(number)
        paths.append(accel.save_state(async_save=background))
        accel.bare_models[0].weight.data.fill_(-1)
    accel.wait_for_save()
    return [paths, accel.save_iteration]


def goes_on(folder: str) -> list:
    accel, _ = project(folder, total_limit=1)
    loaded = accel.load_state()
    weight = accel.bare_models[0].weight.tolist()
    return [loaded, weight, accel.save_state(), accel.save_state()]


@pytest.mark.parametrize("background", [False, True])
def test_processes_agree_on_numbers_and_the_oldest_go(pool, tmp_path, background):
    results = pool.run(saves, str(tmp_path), 4, background)
    assert results[0] == results[1]
    paths, following = results[0]
    assert [Path(path).name for path in paths] == [f"checkpoint_{n}" for n in range(4)]
    assert following == 4
    there = checkpoint_io.CheckpointFolder(tmp_path / "checkpoints").list()
    assert [info.name for info in there] == ["checkpoint_2", "checkpoint_3"]
    assert all(info.manifest.world_size == 2 for info in there)
    results = pool.run(goes_on, str(tmp_path))
    assert results[0] == results[1]
    loaded, weight, *after = results[0]
    assert Path(loaded).name == "checkpoint_3"
    assert weight == [[3.0, 3.0]]
    assert [Path(path).name for path in after] == ["checkpoint_4", "checkpoint_5"]
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("[!.]*"))
    assert left == ["checkpoint_3", "checkpoint_5"]  # the one that it was resumed from stays


def cannot_list(folder: str) -> None:
    accel, _ = project(folder)
    if accel.is_main_process:
        Path(folder, "checkpoints").write_text("no folder")
    accel.wait_for_everyone()
    accel.save_state()


def test_a_folder_that_the_main_process_cannot_use_is_an_error_on_both(pool, tmp_path):
    kinds = [kind for kind, _ in pool.outcomes(cannot_list, str(tmp_path))]
    assert "ok" not in kinds


NODE = """
    import sys, torch
    from accel_callbacks import Accelerator, ProjectConfiguration

    config = ProjectConfiguration(sys.argv[1], save_on_each_node=True)
    accel = Accelerator(cpu=True, project_config=config)
    assert not accel.is_main_process or accel.process_index == 0
    accel.save_model(accel.prepare(torch.nn.Linear(1, 1)), sys.argv[1])
    accel.save({"mean": torch.ones(1)}, sys.argv[1] + "/mean.safetensors")
    try:
        accel.save_state()
    except ValueError as error:
        print(error)
    accel.end_training()
"""


def test_with_a_disk_of_its_own_each_node_gets_the_model(tmp_path):
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    nodes = [
        warm.Popen(
            [sys.executable, "-c", textwrap.dedent(NODE), str(tmp_path / f"disk{rank}")],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, node in enumerate(nodes):
        told, _ = node.communicate()
        assert node.returncode == 0
        assert "all nodes see" in told
        names = {path.name for path in (tmp_path / f"disk{rank}").iterdir()}
        assert names == {"model.safetensors", "mean.safetensors"}
