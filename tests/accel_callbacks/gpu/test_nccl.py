"""NCCL: aborts with work in flight, and errors of one rank; run with -m gpu where there are GPUs.

What an abort does to queued work and to the process, only a device can tell. Nothing here reads a
clock: a rank that hangs meets the limit of its process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 100  # seconds, far below the timeout of the group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def run_ranks(code: str, *words: str, world: int) -> list[tuple[int, str]]:
    """Exit code and output of each rank, all of them on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "PYTHONPATH": str(ROOT)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        texts = [process.communicate(timeout=LIMIT)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, text) for process, text in zip(ranks, texts, strict=True)]


IN_FLIGHT = """
import time, torch, torch.distributed as dist
from accel_callbacks import Accelerator, RemoteError
from accel_callbacks.distributed.abort import abort_devices
from accel_callbacks.distributed.heartbeat import remote_failure

torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
accel = Accelerator()
second = dist.new_group()
weight = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
optimizer = accel.prepare(torch.optim.SGD([weight], lr=1.0))
weight.grad = torch.ones_like(weight)
for group in (None, second):
    dist.all_reduce(weight.grad, group=group)
torch.cuda.synchronize()
torch.cuda._sleep(int(4e9))
for group in (None, second):
    dist.all_reduce(weight.grad, group=group)
remote_failure.note(lambda where: RemoteError(rank=1, where=where, details="planted"))
print("abort has ended:", abort_devices())
try:
    print("sum:", weight.grad.sum().item())
except RuntimeError as error:
    print("sum raised", type(error).__name__)
try:
    optimizer.step()
except RemoteError as error:
    print("step raised:", error)
assert bool((weight == 1).all()), "a step with gradients that were never summed"
try:
    dist.all_reduce(weight.grad)
    torch.cuda.synchronize()
    print("a later collective did not raise")
except RuntimeError as error:
    print("a later collective raised", type(error).__name__)
time.sleep(5)  # in which torch's own watchdog would end the process
print("alive")
"""


@pytest.mark.parametrize("handling", ["0", "1", "3"])
def test_an_abort_ends_with_work_in_flight_and_the_process_lives(monkeypatch, handling):
    """torch's text asks for 0, its default is 3: the watchdog must not take over."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)
    ((code, text),) = run_ranks(IN_FLIGHT, world=1)
    assert code == 0, text
    assert "abort has ended: True" in text
    assert "step raised: rank 1 failed in step: planted" in text
    assert "alive" in text


NCCL_ONLY = """
import torch, torch.distributed as dist
from accel_callbacks import Accelerator, collectives
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=0, world_size=1)
print("serves the CPU:", collectives.group._serves_cpu(dist.group.WORLD))
"""


def test_a_group_of_nccl_alone_serves_no_tensors_of_the_cpu():
    ((code, text),) = run_ranks(NCCL_ONLY, world=1)
    assert code == 0, text
    assert "serves the CPU: False" in text


ONE_FAILS = """
import os, signal, sys
from contextlib import nullcontext
from datetime import timedelta
import torch, torch.distributed as dist
from accel_callbacks import Accelerator

place, how, group = sys.argv[1:4]
if group == "own":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(minutes=10))
    accel = Accelerator()
else:
    accel = Accelerator(timeout=timedelta(minutes=10))

def fail():
    if accel.process_index == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("planted")

data = torch.utils.data.DataLoader(torch.ones(64, 8), 2)
with accel.run("nccl", resume=False) if how != "plain" else nullcontext():
    if place == "before the first collective":
        fail()
    model = torch.nn.Linear(8, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accel.prepare(model, sgd, data)
    for index, batch in enumerate(data):
        loss = model(batch).sum()
        if place == "backward" and index == 3:
            fail()
        accel.backward(loss)
        loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print("step", index, flush=True)
"""


@two_gpus
@pytest.mark.parametrize("group", ["ours", "own"])
@pytest.mark.parametrize("place", ["backward", "before the first collective"])
def test_an_error_of_one_rank_ends_the_other_with_it(place, group):
    (code, text), (failed, own) = run_ranks(ONE_FAILS, place, "raise", group, world=2)
    assert (code, failed) == (1, 1), text + own
    assert "rank 1 failed in the run 'nccl'" in text
    assert "ValueError: planted" in text
    assert "step 3" not in text, "a step with gradients that were never summed"
    assert "ValueError: planted" in own
    assert "RemoteError" not in own


@two_gpus
def test_a_rank_that_ends_with_an_error_outside_of_a_run_ends_at_once():
    """It aborts NCCL at its exit: the other one waits for it, and the launcher ends that."""
    command = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--num_processes", "2"]
    done = subprocess.run(
        [*command, "--no_python", sys.executable, "-c", ONE_FAILS, "backward", "plain", "ours"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 1, done.stderr
    assert "ValueError: planted" in done.stderr


@two_gpus
def test_a_rank_that_is_killed_is_named_and_the_launcher_ends_the_other():
    command = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--num_processes", "2"]
    done = subprocess.run(
        [*command, "--no_python", sys.executable, "-c", ONE_FAILS, "backward", "kill", "ours"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 128 + 9, done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr


VOTES = """
import os
from datetime import timedelta
import torch
from accel_callbacks import Accelerator, Callback

class Stops(Callback):
    can_vote = True

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        if run.global_rank == 1 and run.global_step == 5:
            run.stop("enough")

accel = Accelerator(callbacks=[Stops()], timeout=timedelta(minutes=10))
model = torch.nn.Linear(8, 8)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.ones(64, 8), 2)
model, optimizer, data = accel.prepare(model, sgd, data)
with accel.run("nccl", resume=False) as run:
    for batch in data:
        accel.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        if run.global_step == 3:  # a vote is under way, and waits for nothing on the device
            torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
print("stopped at", run.global_step)
"""


@two_gpus
def test_votes_wait_for_nothing_on_the_device():
    for code, text in run_ranks(VOTES, world=2):
        assert code == 0, text
        assert "stopped at 6" in text


@pytest.mark.skipif(
    int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) < 2,
    reason="needs srun --nodes=2 --ntasks-per-node=1 pytest -m gpu THIS_FILE -k two_nodes",
)
def test_two_nodes_train_where_only_nccl_has_an_interface(monkeypatch):
    """With NCCL_SOCKET_IFNAME set and, as by Debian, a host name that leads to 127.0.1.1."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    command = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--nproc_per_node", "1"]
    done = subprocess.run(
        [*command, "--no_python", sys.executable, "-c", VOTES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped at 6" in done.stdout
