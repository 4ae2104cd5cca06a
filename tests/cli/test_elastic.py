"""examples/elastic.py loses a worker or a launcher on the way, and comes to the same end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "elastic.py")
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "accel": [sys.executable, "-m", "accel_callbacks.cli", "launch"],
}
STEPS = 57  # of an epoch, on any number of processes
Start = Callable[..., "subprocess.Popen[str]"]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="compares runs on the CPU"),
]
both = pytest.mark.parametrize("launcher", LAUNCHERS)
torchrun_when_slow = pytest.mark.parametrize(
    "launcher", ["accel", pytest.param("torchrun", marks=pytest.mark.slow)]
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command; it is killed at the end, with what it has started, if it is still there."""
    started: list[subprocess.Popen[str]] = []

    def begin(launcher: str, *words: str, shared: bool = False) -> subprocess.Popen[str]:
        keep = ("ACCEL_", "TORCH", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "SLURM_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(keep)}
        env |= {"OMP_NUM_THREADS": "1"}
        if launcher == "torchrun" and not shared:  # `accel launch` sets it
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        process = warm.Popen(
            [*LAUNCHERS[launcher], *words],
            cwd=tmp_path, env=env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, warm_children=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def printed_by(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    return printed


def epochs_in(*printed: str) -> dict[str, str]:
    """Return the last report of each epoch in which every sample was seen once."""
    found = re.findall(r"^epoch (\d+): (\d+ samples, each once: True, .*)$", "".join(printed), re.M)
    return dict(found)


def begins_in(printed: str) -> list[tuple[int, int]]:
    """With how many processes it began, at which step."""
    found = re.findall(r"^(\d+) processes begin at step (\d+)$", printed, re.M)
    return [(int(processes), int(step)) for processes, step in found]


def weights_in(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def script(folder: str, epochs: int, *options: str) -> list[str]:
    return [SCRIPT, "--project_dir", folder, "--epochs", str(epochs), *options]


def on_two(folder: str, epochs: int, *options: str) -> list[str]:
    return ["--nproc_per_node", "2", *options, *script(folder, epochs)]


def node(number: int, port: int, nodes: str = "1:2") -> list[str]:
    """The options of one of some launchers on this machine, by default of two that may be alone."""
    # Those that are there wait so long for more, unless all are: on a busy machine one comes late.
    conf = f"is_host={number == 0},join_timeout=600,keep_alive_interval=2,last_call_timeout=30"
    where = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "run"]
    alike = ["--nproc_per_node", "1", "--local_addr", "127.0.0.1", "--max_restarts", "3"]
    return ["--nnodes", nodes, *alike, *where, "--rdzv_conf", conf]


@torchrun_when_slow
def test_a_killed_worker_is_started_again_and_nothing_changes(
    start: Start, tmp_path: Path, launcher: str
) -> None:
    lost = ["--lose", "worker", "--lose_at", "37"]
    # At the same time: most of it is waiting for imports.
    runs = [
        start(launcher, *on_two("whole", 1)),
        start(launcher, "--nproc_per_node", "2", "--max_restarts", "1", *script("lost", 1, *lost)),
    ]
    whole, printed = [printed_by(run) for run in runs]
    assert begins_in(printed) in [[(2, 0), (2, 20)], [(2, 0), (2, 30)]]  # 30 may be half written
    assert epochs_in(printed) == epochs_in(whole)
    assert len(epochs_in(whole)) == 1
    assert weights_in(tmp_path / "lost") == weights_in(tmp_path / "whole")


@pytest.mark.slow
@both
@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_process_can_be_lost_as_well_as_another(
    start: Start, tmp_path: Path, launcher: str, rank: str
) -> None:
    lost = ["--lose", "worker", "--lose_rank", rank]
    again = ["--nproc_per_node", "2", "--max_restarts", "1"]
    whole = printed_by(start(launcher, *on_two("whole", 2)))
    printed = printed_by(start(launcher, *again, *script("lost", 2, *lost)))
    assert begins_in(printed) in [[(2, 0), (2, 40)], [(2, 0), (2, 50)]]
    assert epochs_in(printed) == epochs_in(whole)
    assert weights_in(tmp_path / "lost") == weights_in(tmp_path / "whole")


@pytest.mark.slow
@both
@pytest.mark.parametrize("shared", [False, True], ids=["own store", "store of the launcher"])
def test_launchers_that_count_restarts_differently_find_each_other(
    start: Start, tmp_path: Path, launcher: str, shared: bool, free_port: int
) -> None:
    """One counts the loss of its worker; to the other it is a machine that comes and goes."""
    if shared and launcher == "accel":
        pytest.skip("accel launch gives each attempt a store of its own")
    lost = script("lost", 2, "--lose", "worker")
    nodes = [start(launcher, *node(one, free_port), *lost, shared=shared) for one in range(2)]
    printed = [printed_by(one) for one in nodes]
    whole = printed_by(start(launcher, *on_two("whole", 2)))
    assert {begin for one in printed for begin in begins_in(one)} & {(2, 40), (2, 50)}
    assert epochs_in(*printed) == epochs_in(whole)
    assert weights_in(tmp_path / "lost") == weights_in(tmp_path / "whole")


@pytest.mark.slow
@both
def test_a_lost_launcher_leaves_fewer_processes_and_the_same_order(
    start: Start, launcher: str, free_port: int
) -> None:
    # Rank 1 kills its launcher, and itself; which of the two that is depends on the rendezvous.
    lost = script("lost", 3, "--lose", "machine")
    nodes = [start(launcher, *node(one, free_port), *lost) for one in range(2)]
    kept, gone = nodes
    printed = printed_by(kept)
    last, _ = gone.communicate()
    assert gone.returncode != 0
    whole = printed_by(start(launcher, *on_two("whole", 3)))
    assert begins_in(printed)[-1] in [(1, 40), (1, 50)]
    assert f"done on 1 processes after {3 * STEPS} steps\n" in printed
    assert epochs_in(last, printed) == epochs_in(whole)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")
def test_three_of_four_machines_have_all_of_the_state_in_memory(
    start: Start, free_port: int
) -> None:
    # A batch that three share as well as four; no checkpoint before the loss.
    options = ["--batch_size", "24", "--every_n_steps", "1000"]
    lost = script("lost", 2, *options, "--memory_every_n_steps", "5", "--lose", "machine")
    nodes = [start("accel", *node(one, free_port, "3:4"), *lost) for one in range(4)]
    printed = "".join(one.communicate()[0] for one in nodes)
    assert sorted(one.returncode for one in nodes)[1:] == [0, 0, 0], printed
    whole = printed_by(start("accel", "--nproc_per_node", "4", *script("whole", 2, *options)))
    assert "resumed from memory" in printed
    assert (4, 0) in begins_in(printed)
    assert begins_in(printed)[-1] in [(3, 50), (3, 55)]  # 55 may not be complete yet
    assert epochs_in(printed) == epochs_in(whole)
    assert len(epochs_in(whole)) == 2
