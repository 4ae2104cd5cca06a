"""Which interface gloo takes on several machines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from accel_callbacks.distributed.process_group import _interface_advice
from accel_callbacks.launch import interface
from tests.cli.test_launch_plan import plan, single
from tests.support import warm

CARDS = ["lo", "eth0", "eth1", "ib0", "docker0"]

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads routes as Linux has them")


@pytest.fixture
def machine(monkeypatch):
    """A machine with some cards, of which eth1 has the route to all others."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(CARDS, start=1)))
    monkeypatch.setattr(interface, "interface_towards", lambda address, existing: "eth1")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("ib", "ib0"),
        ("=eth0", "eth0"),
        ("^lo,docker", "eth1"),
        ("eth", "eth1"),  # two of them, so the one with the route
        ("^ib", "eth1"),
        ("wlan", None),
        ("ib,docker", None),  # two, and the route is on neither
        ("", "eth1"),
    ],
)
def test_it_is_the_one_that_nccl_takes_else_the_one_with_the_route(machine, asked, expected):
    environment = {"NCCL_SOCKET_IFNAME": asked} if asked else {}
    found = interface.gloo_variables("node0", environment)
    assert found == ({} if expected is None else {"GLOO_SOCKET_IFNAME": expected})


def test_one_that_was_set_is_kept(machine):
    assert interface.gloo_variables("node0", {"GLOO_SOCKET_IFNAME": "ib0"}) == {}


SEVERAL = ["--num_processes", "2", "--num_machines", "2", "--main_process_ip", "10.0.0.1"]


@pytest.mark.parametrize("words", [[], ["--max_restarts", "1"]])
def test_the_launcher_sets_it_on_several_machines_only(machine, words):
    assert plan(*SEVERAL, *words, "-m", "timeit").env["GLOO_SOCKET_IFNAME"] == "eth1"
    assert plan("--num_processes", "2", "-m", "timeit").env["GLOO_SOCKET_IFNAME"] == "lo"


def test_so_does_a_task_of_srun(machine):
    job = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[0-1]",
        "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }  # fmt: skip
    assert single("-m", "timeit", environ=job).env["GLOO_SOCKET_IFNAME"] == "eth1"


@linux
def test_the_route_of_this_machine_is_found_without_a_package():
    existing = [name for _, name in socket.if_nameindex()]
    for name in existing:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            own = interface._address_of(name, probe)
        if own is not None and not own.startswith("127."):
            assert interface.interface_towards(own, existing) == name
    assert interface.interface_towards("127.0.1.1", existing) is None
    assert interface.interface_towards("no.such.host.invalid", existing) is None


@pytest.mark.parametrize(
    ("env", "told"),
    [({}, "the address that its host name leads to"), ({"GLOO_SOCKET_IFNAME": "ib0"}, "ib0")],
)
def test_the_error_names_the_variable(env, told):
    text = _interface_advice("Gloo connectFullMesh failed with timeout.\nframe #0", env)
    assert text.startswith("gloo cannot connect the processes: Gloo connectFullMesh failed with ti")
    assert f"listens at {'the interface ' if env else ''}{told}. Set GLOO_SOCKET_IFNAME" in text


NOWHERE = """
from datetime import timedelta
from accel_callbacks import Accelerator
Accelerator(cpu=True, timeout=timedelta(minutes=10))
"""


@pytest.mark.distributed
def test_ranks_that_gloo_cannot_bind_say_so():
    place = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    place["GLOO_SOCKET_IFNAME"] = "nowhere7"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place["MASTER_PORT"] = str(probe.getsockname()[1])
    ranks = [
        warm.Popen(
            [sys.executable, "-c", NOWHERE],
            env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        texts = [process.communicate()[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    # The other rank may learn first that its peer is gone.
    assert any(
        "gloo cannot connect the processes" in text
        and "at the interface nowhere7. Set GLOO_SOCKET_IFNAME" in text
        for text in texts
    )
