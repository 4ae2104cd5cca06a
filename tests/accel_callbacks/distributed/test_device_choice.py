"""Which device a process takes, where the script or a scheduler has chosen; four stand-in GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_callbacks.distributed import topology
from accel_callbacks.distributed.process_group import GroupOptions
from accel_callbacks.distributed.topology import Topology


class Gpus:
    """Stands in for torch.accelerator: some devices, of which one is current."""

    def __init__(self) -> None:
        self.count, self.current = 4, 0

    def select(self, device: torch.device) -> None:
        self.current = device.index


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    fake = Gpus()
    monkeypatch.setattr(topology, "own_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(topology, "select_device", fake.select)
    monkeypatch.setattr(
        torch.accelerator, "current_device_index", lambda: fake.current, raising=False
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: fake.count)
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"):
        monkeypatch.delenv(name, raising=False)
    return fake


def detect(backend: str | None = None, **env: Any) -> Topology:
    return topology._detect(False, GroupOptions(backend), {k: str(v) for k, v in env.items()})


# --- a process alone --------------------------------------------------------------------------


def test_a_process_alone_keeps_the_device_that_the_script_has_made_current(gpus):
    gpus.current = 3
    assert detect().device == torch.device("cuda", 3)
    assert gpus.current == 3


def test_a_process_alone_takes_the_first_device_by_default_and_its_own_from_a_launcher(gpus):
    assert detect().device == torch.device("cuda", 0)
    gpus.current = 3
    launched = detect(RANK=0, WORLD_SIZE=1, LOCAL_RANK=1)
    assert launched.device == torch.device("cuda", 1)
    assert gpus.current == 1


# --- a group that the script has made ---------------------------------------------------------


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that the script has made a group, with ranks of other machines too."""

    def join(rank: int, world: int, backend: str = "cpu:gloo,cuda:nccl") -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        monkeypatch.setattr(dist, "get_backend", lambda: backend)
        monkeypatch.setattr(dist, "get_backend_config", lambda: backend)

    return join


@pytest.mark.parametrize(
    ("env", "current", "local_rank"),
    [
        ({"SLURM_LOCALID": 2}, 0, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": 2}, 1, 2),
        ({"LOCAL_RANK": 1, "MPI_LOCALRANKID": 2}, 3, 1),
        ({}, 3, 3),
        ({}, 0, 1),  # 5 % 4
    ],
    ids=["SLURM", "Open MPI", "launcher", "current device", "nothing is known"],
)
def test_a_rank_of_a_second_machine_finds_its_device(gpus, join, env, current, local_rank):
    join(5, 8)
    gpus.current = current
    found = detect(**env)
    assert (found.rank, found.local_rank, found.local_world_size) == (5, local_rank, 4)
    assert found.device == torch.device("cuda", local_rank)


def test_ranks_are_the_same_before_there_is_a_topology(gpus, join, monkeypatch):
    join(5, 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    topology.destroy_topology()
    assert topology.process_rank() == (5, 8, 1, 4)


def test_on_the_cpu_the_local_rank_is_the_rank_or_that_of_the_scheduler(gpus, join):
    def ranks(env: Mapping[str, str]) -> Any:
        return topology._group_ranks(env, cpu=True)

    join(5, 8)
    assert ranks({}) == (5, 8, 5, 8)
    assert ranks({"SLURM_LOCALID": "1"}) == (5, 8, 1, 8)


# --- more processes than devices --------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
@pytest.mark.parametrize("grouped", [True, False], ids=["own group", "launched"])
def test_processes_share_a_device_with_gloo(gpus, join, monkeypatch, backend, grouped):
    gpus.count = 1
    monkeypatch.setattr(topology, "_join", lambda *args: backend)
    if grouped:
        join(1, 2, "cpu:gloo,cuda:gloo")
        found = detect(LOCAL_RANK=1)
    else:
        found = detect(backend, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1)
    assert (found.local_rank, found.device) == (1, torch.device("cuda", 0))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_processes_do_not_share_a_device_with_nccl_and_the_error_says_what_to_do(
    gpus, join, backend
):
    gpus.count = 1
    wanted = r"local rank 1 has no device.*1\. .*--cpu.*gloo.*LOCAL_RANK"
    with pytest.raises(RuntimeError, match=wanted):
        detect(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1)
    join(1, 2, backend)
    with pytest.raises(RuntimeError, match=wanted):
        detect(LOCAL_RANK=1)
