"""Scripts that end with an error on one of two processes: both end, and both say which."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.loss import loss_of
from tests.support.ports import free_port

SUPPORT = Path(__file__).resolve().parents[2] / "support"

pytestmark = pytest.mark.distributed


def slow(*values):
    """A case of the long run: it differs from another one in the rank only."""
    return pytest.param(*values, marks=pytest.mark.slow)


SCRIPT = """
import sys, time
from datetime import timedelta
import torch
from accel_callbacks import Accelerator

how, failing = sys.argv[1], int(sys.argv[2])
accel = Accelerator(cpu=True, timeout=timedelta(minutes=10))
model = torch.nn.Linear(1, 1)
model, data = accel.prepare(model, torch.utils.data.DataLoader(torch.ones(8, 1), 2))

def loop():
    for index, batch in enumerate(data):
        if index == 1 and accel.process_index == failing:
            raise ValueError("no space left")
        if index == 1 and how == "late":
            time.sleep(2)
        accel.backward(model(batch).sum())

if how == "plain":
    loop()
elif how == "plain, ended":
    try:
        loop()
    finally:
        accel.end_training()
elif how == "alone again":
    try:
        with accel.run("demo"):
            loop()
    except ValueError:
        Accelerator(cpu=True)
else:
    with accel.run("demo"):
        loop()
"""


def run_script(*args: str, code: str = SCRIPT) -> list[tuple[int, str]]:
    """Exit code and errors of each of two processes."""
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        warm.Popen(
            [sys.executable, "-c", code, *args],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            destructors=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


@pytest.mark.parametrize(
    ("how", "failing"), [("run", 0), slow("late", 1), slow("run", 1), slow("late", 0)]
)
def test_a_script_that_fails_tells_the_error_on_all_processes(how, failing):
    outcomes = run_script(how, str(failing))
    assert [code for code, _ in outcomes] == [1, 1]
    assert "RemoteError" not in outcomes[failing][1]
    # also where the process that kept the report has had its end before it was read
    assert f"RemoteError: rank {failing} failed" in outcomes[1 - failing][1]
    assert "ValueError: no space left" in outcomes[1 - failing][1]


@pytest.mark.parametrize(
    ("how", "failing"),
    [("plain", 0), ("plain, ended", 1), slow("plain", 1), slow("plain, ended", 0)],
)
def test_a_script_without_a_run_ends_too(how, failing):
    outcomes = run_script(how, str(failing))
    assert [code for code, _ in outcomes] == [1, 1]
    assert "ValueError: no space left" in outcomes[failing][1]
    assert "RuntimeError" in outcomes[1 - failing][1]


@pytest.mark.parametrize("failing", [slow(0), 1])
def test_a_process_does_not_begin_again_where_the_others_have_ended(failing):
    outcomes = run_script("alone again", str(failing))
    assert [code for code, _ in outcomes] == [1, 1]
    assert "has ended" in outcomes[failing][1]
    assert "start the script again" in outcomes[failing][1]


OWN_GROUP = """
import os, sys
import torch.distributed as dist
from accel_callbacks import Accelerator

rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)

def start(name):
    own = dist.PrefixStore(name, store)  # else gloo may read the addresses of the group before
    dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
    return Accelerator(cpu=True)

for name in ("first", "second"):
    try:
        with (accel := start(name)).run(name):
            1 / accel.process_index
            accel.wait_for_everyone()
    except Exception as error:
        print(type(error).__name__, str(error).partition(":")[0], file=sys.stderr)
    try:
        Accelerator(cpu=True)
    except RuntimeError as error:
        print(error, file=sys.stderr)
    dist.destroy_process_group()
"""


def test_a_broken_group_that_the_script_made_is_the_scripts_to_make_anew():
    outcomes = run_script(code=OWN_GROUP)
    assert [code for code, _ in outcomes] == [0, 0]
    assert "ZeroDivisionError" in outcomes[0][1]
    assert "RemoteError rank 0 failed in the run 'first'" in outcomes[1][1]
    assert "RemoteError rank 0 failed in the run 'second'" in outcomes[1][1]
    for _, text in outcomes:
        assert "call destroy_process_group() and init_process_group()" in text


DIES = """
import os, sys
from datetime import timedelta
from accel_callbacks import Accelerator

failing = int(sys.argv[1])
accel = Accelerator(cpu=True, timeout=timedelta(minutes=10))
accel.wait_for_everyone()
if accel.process_index == failing:
    os._exit(7)
try:
    accel.load_state("memory://nothing")
except RuntimeError:
    os._exit(3)
"""


def test_a_process_that_dies_before_the_first_load_keeps_the_other_waiting_for_no_group():
    (code, text), (gone, _) = run_script("1", code=DIES)
    assert (code, gone) == (3, 7), text


DIES_LOADING = """
import os, signal, sys
from datetime import timedelta
import torch
from accel_callbacks import Accelerator
from checkpoint_io.loader.transfer import Transfer

failing, folder = int(sys.argv[1]), sys.argv[2]
accel = Accelerator(cpu=True, timeout=timedelta(minutes=10))
model = torch.nn.Linear(100, 100)
model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
path = accel.save_state(folder)

def deliver(transfer, *args, original=Transfer._deliver):
    if transfer.nbytes > 40_000:  # the weights, not the headers
        os.kill(os.getpid(), signal.SIGKILL)
    return original(transfer, *args)

if accel.process_index == failing:
    Transfer._deliver = deliver
for attempt in (lambda: accel.load_state(path), optimizer.step):
    try:
        attempt()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
os._exit(3)
"""


@pytest.mark.parametrize("failing", [0, slow(1)])
def test_a_process_that_dies_while_it_loads_is_named_and_nobody_goes_on(failing, tmp_path):
    outcomes = run_script(str(failing), str(tmp_path / "state"), code=DIES_LOADING)
    (code, text), (gone, _) = outcomes[1 - failing], outcomes[failing]
    assert (code, gone) == (3, -9), text
    assert re.search(rf"^\w+Error: .*{loss_of(failing, 'SIGKILL')}", text, re.M), text
    assert "ResumeError: step: loading" in text, text  # nor can it step


CUT_OFF = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
from accel_callbacks import Accelerator
from accel_callbacks.collectives import all_objects
from accel_callbacks.distributed import abort
sys.path.insert(0, sys.argv[1])
from bound import patience
from gated_files import Gate

how, folder = sys.argv[2:]
# Both are there before they join: the timeout, which has to pass, is short.
Path(folder, f"ready-{os.environ['RANK']}").touch()
while len(list(Path(folder).glob("ready-*"))) < 2:
    time.sleep(0.01)
accel = Accelerator(cpu=True, timeout=timedelta(seconds=patience(4)))
other = all_objects(os.getpid(), operation="test")[1]
model = accel.prepare(torch.nn.Linear(1, 1))
gate = Gate(folder)
gate.shut()
accel.wait_for_everyone()
try:
    with accel.run("demo", resume=False):
        accel.save_state(gate.root + "/c", storage_options=gate.options, async_save=True)
        accel.wait_for_everyone()
        if accel.process_index == 1 and how == "cut off":
            os.kill(os.getpid(), signal.SIGSTOP)  # closes no connection
        if how == "cut off":
            gate.open()
        elif accel.process_index == 1:
            time.sleep(patience(7))  # longer than the other waits
            abort.threading.Timer(patience(12), gate.open).start()
        accel.wait_for_everyone()
finally:
    if how == "cut off":
        os.kill(other, signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["cut off", slow("late")])
def test_a_save_ends_without_a_process_that_is_cut_off_and_with_one_that_is_late(how, tmp_path):
    outcomes = run_script(str(SUPPORT), how, str(tmp_path), code=CUT_OFF)
    (code, text), (other, _) = outcomes
    assert (code, other) == ((1, -signal.SIGKILL) if how == "cut off" else (1, 1)), text
    assert ("the save that was under way failed" in text) is (how == "cut off"), text
    assert ("the save that was under way has ended well" in text) is (how == "late"), text


KILLED = """
import os, signal, sys
from datetime import timedelta
import torch
from accel_callbacks import Accelerator, LostRankError

accel = Accelerator(cpu=True, timeout=timedelta(minutes=10))
model = accel.prepare(torch.nn.Linear(1, 1))
accel.wait_for_everyone()
try:
    with accel.run("demo", resume=False):
        accel.backward(model(torch.ones(1, 1)).sum())
        if accel.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        accel.wait_for_everyone()
except LostRankError:
    Accelerator(cpu=True)
"""


def test_a_restart_in_the_process_does_not_wait_for_a_process_that_was_killed():
    (code, text), (killed, _) = run_script(code=KILLED)
    assert (code, killed) == (1, -signal.SIGKILL), text
    assert re.search(r"RuntimeError: rank 1 .*does not rejoin: start the script again", text), text
