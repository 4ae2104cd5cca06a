"""Two machines, each a network namespace with its own name and cable: lost, cut off, back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.listening import listening
from tests.support.loss import tells_of_loss

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "elastic.py")
NAMES = ("nodea", "nodeb")
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "accel": [sys.executable, "-m", "accel_callbacks.cli", "launch"],
}
# Each machine has its own name, so that the launcher and gloo find out by themselves who is who.
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_emulate() -> bool:
    """Return whether this user may create network namespaces."""
    if not all(shutil.which(tool) for tool in ("ip", "unshare", "mount", "hostname")):
        return False
    name = f"accel{os.getpid()}try"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError:
        return False
    try:
        test = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "hostname", "other"]
        return subprocess.run(test, check=False, capture_output=True).returncode == 0
    finally:
        ip("netns", "del", name)


def kill_all_in(space: str) -> None:
    """Again until nothing is left: something may have been started meanwhile."""
    for _ in range(100):
        running = subprocess.run(["ip", "netns", "pids", space], capture_output=True, check=False)
        if not running.stdout.strip():
            return
        for pid in running.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def remove(space: str) -> None:
    kill_all_in(space)
    subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def sweep() -> None:
    """Remove what test runs have left that were killed: of processes that are no more, and ours."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for space, pid in re.findall(r"^(accel(\d+)(?:nodea|nodeb|try))\b", listed.stdout, re.M):
        if int(pid) == os.getpid() or not Path("/proc", pid).exists():
            remove(space)


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces"),
]


class Machines:
    """Two of them on one cable, with a folder that both see."""

    def __init__(self, folder: Path) -> None:
        """Choose names for the machines; `connect` creates them."""
        self.folder = folder
        self.spaces = [f"accel{os.getpid()}{name}" for name in NAMES]
        self.started: list[subprocess.Popen[bytes]] = []
        self.hosts = folder / "hosts"
        lines = [f"10.77.0.{number} {name}" for number, name in enumerate(NAMES, start=1)]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def connect(self) -> None:
        """Make the namespaces, with the cable between them."""
        for space in self.spaces:
            ip("netns", "add", space)
        first, second = self.spaces
        ends = ["eth0", "netns", first, "type", "veth", "peer", "eth0", "netns", second]
        ip("link", "add", *ends)
        for number, space in enumerate(self.spaces, start=1):
            ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "eth0", "up")

    def start(self, machine: int, command: list[str], log: str) -> subprocess.Popen[bytes]:
        """Run a command there; what it prints goes into a file of the shared folder."""
        inside = ["unshare", "--uts", "--mount", "bash", "-c", ENTER, "bash"]
        enter = ["ip", "netns", "exec", self.spaces[machine], *inside]
        keep = ("ACCEL_", "TORCH", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "SLURM_", "GLOO_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(keep)}
        env |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / log).open("wb") as out:
            process = subprocess.Popen(
                [*enter, str(self.hosts), NAMES[machine], *command],
                cwd=self.folder, env=env, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def cable(self, machine: int, state: str) -> None:
        """Plug it in or out: "up" or "down"."""
        ip("-n", self.spaces[machine], "link", "set", "eth0", state)

    def read(self, log: str) -> str:
        return (self.folder / log).read_text(errors="replace")

    def wait_for(self, text: str, *logs: str) -> None:
        """Until one of the logs has the text."""
        while True:
            ended = all(process.poll() is not None for process in self.started)
            if any(text in self.read(log) for log in logs):
                return
            assert not ended, "\n".join(self.read(log) for log in logs)
            time.sleep(0.1)

    def power_off(self, machine: int) -> None:
        """Kill everything that runs there."""
        kill_all_in(self.spaces[machine])

    def remove(self) -> None:
        for space in self.spaces:
            remove(space)
        for process in self.started:
            process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if not can_emulate():
        pytest.skip("needs the right to make network namespaces")
    sweep()
    made = Machines(tmp_path)
    try:
        made.connect()
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """The epochs and the weights of two processes of which nothing was lost."""
    folder = tmp_path_factory.mktemp("whole")
    command = [*LAUNCHERS["torchrun"], "--nproc_per_node", "2", SCRIPT, "--project_dir", "whole"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return epochs_in(done.stdout), weights_in(folder / "whole")


def epochs_in(printed: str) -> list[str]:
    return re.findall(r"^epoch .*, each once: True, order .*$", printed, re.M)


def weights_in(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def elastic(launcher: str, machine: int, *options: str) -> list[str]:
    """A node of a run that one or two of them share."""
    # Seconds until an unresponsive machine counts as gone: three times the interval.
    conf = "join_timeout=600,last_call_timeout=30,keep_alive_interval=2"
    meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "nodea:29400", "--rdzv_id", "run"]
    nodes = ["--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3"]
    return [*LAUNCHERS[launcher], *nodes, *meet, "--rdzv_conf", conf, SCRIPT, *options]


def static(launcher: str, machine: int, *options: str) -> list[str]:
    """A node of a run that takes both."""
    ours = ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(machine)]
    theirs = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(machine)]
    nodes = ours if launcher == "accel" else theirs
    address = ["--main_process_ip", "nodea", "--main_process_port", "29500"]
    if launcher == "torchrun":
        address = ["--master_addr", "nodea", "--master_port", "29500"]
    return [*LAUNCHERS[launcher], *nodes, *address, "--max_restarts", "2", SCRIPT, *options]


def ended_well(machines: Machines, node: subprocess.Popen[bytes], log: str) -> None:
    assert node.wait() == 0, machines.read(log)


every_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


@every_launcher
@pytest.mark.parametrize("meet", [static, elastic], ids=["static", "c10d"])
def test_a_lost_worker_changes_nothing(machines, whole, launcher, meet):
    nodes = [
        machines.start(one, meet(launcher, one, "--lose", "worker"), f"log{one}")
        for one in range(2)
    ]
    for one, node in enumerate(nodes):
        ended_well(machines, node, f"log{one}")
    printed = machines.read("log0") + machines.read("log1")
    assert re.search(r"^2 processes begin at step [45]0$", printed, re.M)
    assert sorted(set(epochs_in(printed))) == whole[0]
    assert weights_in(machines.folder / "runs" / "elastic") == whole[1]


@every_launcher
def test_a_lost_machine_leaves_one_that_goes_on_in_the_same_order(machines, whole, launcher):
    node = machines.start(0, elastic(launcher, 0), "log0")
    machines.start(1, elastic(launcher, 1), "log1")
    machines.wait_for("epoch 1:", "log0", "log1")
    machines.power_off(1)
    ended_well(machines, node, "log0")
    printed = machines.read("log0")
    assert re.search(r"^1 processes begin at step [1-9]", printed, re.M)
    assert "done on 1 processes after 171 steps" in printed
    assert sorted(set(epochs_in(printed + machines.read("log1")))) == whole[0]


def test_what_a_lost_machine_had_in_memory_is_in_that_of_the_other(machines, whole):
    options = ["--every_n_steps", "1000", "--memory_every_n_steps", "5"]
    node = machines.start(0, elastic("accel", 0, *options), "log0")
    machines.start(1, elastic("accel", 1, *options), "log1")
    machines.wait_for("epoch 1:", "log0", "log1")
    machines.power_off(1)
    ended_well(machines, node, "log0")
    printed = machines.read("log0")
    assert "resumed from memory" in printed
    (began,) = re.findall(r"^1 processes begin at step (\d+)", printed, re.M)
    assert int(began) >= 50
    assert int(began) % 5 == 0
    assert sorted(set(epochs_in(printed + machines.read("log1")))) == whole[0]


@every_launcher
def test_a_machine_that_is_cut_off_is_left_behind(machines, whole, launcher):
    node = machines.start(0, elastic(launcher, 0), "log0")
    machines.start(1, elastic(launcher, 1), "log1")
    machines.wait_for("epoch 1:", "log0", "log1")
    machines.cable(1, "down")
    ended_well(machines, node, "log0")
    printed = machines.read("log0")
    assert re.search(r"^1 processes begin at step [1-9]", printed, re.M)
    assert "done on 1 processes after 171 steps" in printed
    assert sorted(set(epochs_in(printed + machines.read("log1")))) == whole[0]


@every_launcher
def test_a_machine_that_comes_back_takes_part_again(machines, launcher):
    long = ["--epochs", "40"]
    node = machines.start(0, elastic(launcher, 0, *long), "log0")
    machines.start(1, elastic(launcher, 1, *long), "log1")
    machines.wait_for("epoch 1:", "log0", "log1")
    machines.power_off(1)
    machines.wait_for("1 processes begin at step", "log0")
    again = machines.start(1, elastic(launcher, 1, *long), "log2")
    ended_well(machines, node, "log0")
    ended_well(machines, again, "log2")
    logs = [machines.read(log) for log in ("log0", "log1", "log2")]
    assert any("done on 2 processes after 2280 steps" in log for log in logs)
    # The one that was there saves before it begins again with the other: no step is lost.
    (stopped,) = re.findall(r"stopped at step (\d+): SIGTERM", logs[0])
    assert f"2 processes begin at step {stopped}" in logs[0] + logs[2]
    reported = {line.split(":")[0]: line for log in logs for line in epochs_in(log)}
    assert sorted(reported) == sorted(f"epoch {epoch}" for epoch in range(1, 41))
    assert len({line.split("order")[1] for line in reported.values()}) == 40


SAVING = """
import sys
from datetime import timedelta
from pathlib import Path
import fsspec, torch
from accel_callbacks import Accelerator
from tests.support.bound import patience
from tests.support.gated_files import GatedFileSystem

fsspec.register_implementation("gated", GatedFileSystem)
folder, background = Path(sys.argv[1]), sys.argv[2] == "background"
accel = Accelerator(cpu=True, timeout=timedelta(seconds=patience(12)))
model = accel.prepare(torch.nn.Linear(4, 4))
own = str(folder / f"gate{accel.process_index}")
with accel.run("demo", resume=False):
    Path(folder, f"saving{accel.process_index}").touch()
    accel.save_state(
        f"gated://{folder}/state", storage_options={"gate": own}, async_save=background
    )
"""


@pytest.mark.parametrize("how", ["at once", "background"])
@pytest.mark.parametrize("cut", [0, 1])
def test_a_machine_that_is_cut_off_in_a_save_ends_the_others(machines, cut, how):
    """Rank 1 writes, and rank 0 waits for it; or the other way round."""
    folder = machines.folder
    (folder / f"gate{cut}").touch()
    nodes = []
    for rank in range(2):
        names = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "nodea", "MASTER_PORT": 29500}
        names |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "PYTHONPATH": ROOT}
        settings = [f"{name}={value}" for name, value in names.items()]
        command = ["env", *settings, sys.executable, "-c", SAVING, str(folder), how]
        nodes.append(machines.start(rank, command, f"log{rank}"))
    while not all((folder / f"saving{rank}").exists() for rank in range(2)):
        ended = [node.poll() for node in nodes]
        assert ended == [None, None], machines.read("log0") + machines.read("log1")
        time.sleep(0.1)
    time.sleep(3)  # the save is under way; an earlier cut ends it with the same words
    machines.cable(1, "down")
    other = 1 - cut
    assert nodes[other].wait() != 0, machines.read(f"log{other}")
    assert tells_of_loss(machines.read(f"log{other}"), cut), machines.read(f"log{other}")
    assert not list(folder.glob("state/manifest*"))


HELD = """
import os, time
import torch.distributed as dist
from accel_callbacks import Accelerator

if os.environ["GROUP"] == "ours":
    Accelerator(cpu=True)
else:
    dist.init_process_group("gloo")
dist.barrier()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has met", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
dist.barrier()
"""


@pytest.mark.parametrize("group", ["ours", "own"])
@pytest.mark.parametrize("meet", [static, elastic], ids=["static", "c10d"])
def test_two_machines_listen_at_the_address_that_was_named(machines, monkeypatch, meet, group):
    monkeypatch.setenv("GROUP", group)
    (machines.folder / "held.py").write_text(HELD)
    nodes = []
    for one in range(2):
        command = meet("accel", one)
        if meet is static:  # with restarts the store is that of c10d
            command[command.index("--max_restarts") :] = [SCRIPT]
        nodes.append(machines.start(one, [*command[:-1], "held.py"], f"log{one}"))
    machines.wait_for("rank 0 of 2 has met", "log0", "log1")
    machines.wait_for("rank 1 of 2 has met", "log0", "log1")
    found = [set(listening(node.pid)) for node in nodes]
    (machines.folder / "go").touch()
    for one, node in enumerate(nodes):
        ended_well(machines, node, f"log{one}")
    assert found == [{"10.77.0.1"}, {"10.77.0.2"}]
    assert "all interfaces" not in machines.read("log0") + machines.read("log1")


@pytest.mark.parametrize("named", ["by the route", "by NCCL_SOCKET_IFNAME"])
def test_gloo_is_where_the_machines_reach_each_other(machines, monkeypatch, named):
    """As Debian has it: on each machine its own name is a loopback address."""
    monkeypatch.setenv("GROUP", "own")
    if named == "by NCCL_SOCKET_IFNAME":
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo")
    (machines.folder / "held.py").write_text(HELD)
    nodes = []
    for one, name in enumerate(NAMES):
        machines.hosts = machines.folder / f"hosts{one}"
        machines.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        command = [*LAUNCHERS["accel"], "--num_machines", "2", "--num_processes", "2"]
        command += ["--machine_rank", str(one), "--main_process_ip", "10.77.0.1", "held.py"]
        nodes.append(machines.start(one, command, f"log{one}"))
    machines.wait_for("rank 0 of 2 has met", "log0", "log1")
    machines.wait_for("rank 1 of 2 has met", "log0", "log1")
    (machines.folder / "go").touch()
    for one, node in enumerate(nodes):
        ended_well(machines, node, f"log{one}")


@pytest.mark.parametrize("words", [[], ["--max_restarts", "1"]])
def test_one_machine_of_a_network_listens_on_loopback(machines, monkeypatch, words):
    monkeypatch.setenv("GROUP", "own")
    (machines.folder / "held.py").write_text(HELD)
    command = [*LAUNCHERS["accel"], "--num_processes", "2", *words, "held.py"]
    node = machines.start(0, command, "log0")
    machines.wait_for("rank 0 of 2 has met", "log0")
    machines.wait_for("rank 1 of 2 has met", "log0")
    found = listening(node.pid)
    (machines.folder / "go").touch()
    ended_well(machines, node, "log0")
    assert set(found) == {"127.0.0.1"}
