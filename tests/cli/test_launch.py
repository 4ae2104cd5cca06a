"""The launcher with real processes: results, exit codes, failures, signals, restarts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import clean_environment
from tests.support import warm

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.distributed

ALL_REDUCE = """
import os, sys, datetime
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
names = ["ACCEL_CPU", "ACCEL_MIXED_PRECISION", "OMP_NUM_THREADS"]
shown = [os.environ.get(name) for name in names]
with open(f"out{dist.get_rank()}", "w") as out:
    print(value.item(), dist.get_world_size(), *shown, sys.argv[1:], file=out)
    print(os.path.realpath(sys.argv[0]), file=out)
dist.barrier()
dist.destroy_process_group()
"""

FAILING = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    print("boom on one", file=sys.stderr)
    sys.exit(23)
time.sleep(1e6)
"""

RESTARTING = """
import os, signal, datetime
import torch, torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
if attempt == 0 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
value = torch.ones(1)
dist.all_reduce(value)
with open(f"out{dist.get_rank()}", "w") as out:
    print(attempt, value.item(), file=out)
dist.barrier()
dist.destroy_process_group()
"""

SLEEPING = """
import os, time
path = "pid" + os.environ["RANK"]
with open(path + ".part", "w") as out:
    out.write(str(os.getpid()))
os.replace(path + ".part", path)
time.sleep(1000)
"""


@pytest.mark.first
def test_two_processes_connect(
    accel: Run, write: Callable[[str, str], str], tmp_path: Path
) -> None:
    script = write("reduce.py", ALL_REDUCE)
    words = ["--cpu", "--num-processes", "2", "--mixed_precision", "bf16", script]
    done = accel(
        "launch", *words, "--num_processes", "7", "--", "$$ ${local_rank}", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        text, _ = (tmp_path / f"out{rank}").read_text().splitlines()
        assert text == "3.0 2 1 bf16 1 ['--num_processes', '7', '--', '$$ ${local_rank}']"


def test_a_module_on_a_fixed_port_has_its_file_as_first_argument(
    warm_accel: Run, write: Callable[[str, str], str], tmp_path: Path, free_port: int
) -> None:
    """As from ``python -m``."""
    file = Path(tmp_path, write("reduce.py", ALL_REDUCE)).resolve()
    words = ["--num_processes", "2", "--main_process_port", str(free_port), "-m", "reduce", "7"]
    done = warm_accel("launch", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        text = (tmp_path / f"out{rank}").read_text()
        assert text == f"3.0 2 None None 1 ['7']\n{file}\n"


def test_what_torchs_launcher_refuses_is_one_line(
    warm_accel: Run, write: Callable[[str, str], str]
) -> None:
    options = ["--cpu", "--num_processes", "2", "--rdzv_backend", "nosuch"]
    done = warm_accel("launch", *options, write("fails.py", FAILING))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("accel launch: error: torch's launcher refuses this: ")
    assert "'nosuch' is not registered" in line


@pytest.mark.slow  # the page's commands and a batch file run on two machines too
def test_two_machines(
    start: Start, write: Callable[[str, str], str], tmp_path: Path, free_port: int
) -> None:
    script = write("reduce.py", ALL_REDUCE)
    meet = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port)]
    words = ["launch", "--num_machines", "2", "--num_processes", "2", *meet, "--machine_rank"]
    machines = [start(*words, str(rank), script, OMP_NUM_THREADS="1") for rank in range(2)]
    for machine in machines:
        _, err = machine.communicate()
        assert machine.returncode == 0, err
    assert [(tmp_path / f"out{rank}").read_text()[:5] for rank in range(2)] == ["3.0 2"] * 2


def test_a_taken_port_is_reported_without_a_traceback(
    warm_accel: Run, write: Callable[[str, str], str], free_port: int
) -> None:
    script = write("reduce.py", ALL_REDUCE)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        port = ["--main_process_port", str(free_port)]
        one = warm_accel("launch", "--cpu", *port, script)
        two = warm_accel("launch", "--cpu", *("--num_processes", "2"), *port, script)
    assert one.returncode == two.returncode == 1
    assert one.stderr.startswith(f"accel launch: error: port {free_port} cannot be used")
    assert "accel launch: error: the processes did not find each other" in two.stderr
    assert "Traceback" not in one.stderr + two.stderr


CHOSEN = """
import sys
from accel_callbacks.cli import launch, main
launch._free_port = lambda: int(sys.argv[1])
sys.exit(main.main(["launch", "--cpu", "--num_processes", "2", sys.argv[2]]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the port is chosen before it is bound there")
def test_a_chosen_port_that_is_taken_since_is_no_error(
    write: Callable[[str, str], str], tmp_path: Path, free_port: int
) -> None:
    script = write("reduce.py", ALL_REDUCE)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        command = [sys.executable, "-c", CHOSEN, str(free_port), script]
        env = {**clean_environment(tmp_path), "OMP_NUM_THREADS": "1"}
        done = warm.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, warm_children=True
        )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"out{rank}").read_text()[:5] for rank in range(2)] == ["3.0 2"] * 2


def test_program_that_is_not_python(accel: Run, tmp_path: Path) -> None:
    done = accel(
        "launch", "--cpu", "--no_python", "sh", "-c", "echo $LOCAL_RANK $WORLD_SIZE; exit 5"
    )
    assert done.stdout == "0 1\n"
    assert done.returncode == 5


@pytest.mark.first
def test_a_failing_rank_is_named_its_code_is_ours_and_its_output_is_kept(
    warm_accel: Run, write: Callable[[str, str], str], tmp_path: Path
) -> None:
    logs = ["--log_dir", "logs", "--tee", "3"]
    done = warm_accel("launch", "--num_processes", "2", *logs, write("fails.py", FAILING))
    assert done.returncode == 23
    assert "fails.py failed: rank 1 exited with code 23" in done.stderr
    assert "boom on one" in done.stderr
    (named,) = [line for line in done.stderr.splitlines() if "its output: " in line]
    assert "boom on one" in (tmp_path / named.split("its output: ")[1]).read_text()


def test_a_killed_rank_gives_128_plus_the_signal(warm_accel: Run) -> None:
    words = ["--cpu", "--num_processes", "2", "--no_python", "sh", "-c"]
    done = warm_accel("launch", *words, "test $RANK = 0 && exec sleep 100000; kill -9 $$")
    assert done.returncode == 137
    assert "rank 1 was killed by SIGKILL" in done.stderr


@pytest.mark.first
def test_one_process_takes_the_place_of_the_launcher(start: Start) -> None:
    launcher = start("launch", "--cpu", "--no_python", "sh", "-c", "echo $$; kill -9 $$")
    out, _ = launcher.communicate()
    assert int(out) == launcher.pid
    assert launcher.returncode == -signal.SIGKILL


def test_missing_script(accel: Run) -> None:
    done = accel("launch", "--num_processes", "2", "absent.py")
    assert done.returncode == 2
    assert done.stderr.startswith("accel launch: error: 'absent.py' is not a file")
    assert "Traceback" not in done.stderr


@pytest.mark.first
def test_restart_after_a_kill(
    warm_accel: Run, write: Callable[[str, str], str], tmp_path: Path
) -> None:
    script = write("restarts.py", RESTARTING)
    words = ["--num_processes", "2", "--max_restarts", "1", script]
    done = warm_accel("launch", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(2)] == ["1 2.0\n"] * 2


@pytest.mark.first
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_leaves_no_child(
    warm_start: Start, write: Callable[[str, str], str], tmp_path: Path, number: signal.Signals
) -> None:
    launcher = warm_start("launch", "--num_processes", "2", write("sleeps.py", SLEEPING))
    pids = [_read_pid(tmp_path / f"pid{rank}", launcher) for rank in range(2)]
    launcher.send_signal(number)
    _, err = launcher.communicate()
    assert launcher.returncode == 128 + number
    assert f"stopped by {number.name}" in err
    assert not [pid for pid in pids if _alive(pid)]


IGNORED = ("SIGHUP", "SIGINT")  # under nohup; and in the background of a shell script
SHOW_IGNORED = f"""
import os, signal
ignored = [name for name in {IGNORED} if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN]
os.makedirs("ranks", exist_ok=True)
open(f"ranks/{{os.environ['RANK']}}", "w").write(" ".join(ignored))
while not os.path.exists("go"):
    pass
"""
CALL = """
from accel_callbacks import debug_launcher

def train():
    exec(open("ignored.py").read(), {})

debug_launcher(train)
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("-m accel_callbacks.cli launch --cpu --num_processes 1 {}", id="one"),
        pytest.param("-m accel_callbacks.cli launch --num_processes 2 {}", id="two"),
        pytest.param("call.py", id="function"),
    ],
)
def test_signals_that_are_ignored_at_the_start_stay_ignored(
    write: Callable[[str, str], str], tmp_path: Path, words: str
) -> None:
    write("call.py", CALL)
    command = [sys.executable, *words.format(write("ignored.py", SHOW_IGNORED)).split()]
    ranks = 1 if "num_processes 1" in words else 2
    numbers = [getattr(signal, name) for name in IGNORED]
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]  # children inherit it
    try:
        launcher = subprocess.Popen(
            command, env=clean_environment(tmp_path), cwd=tmp_path, start_new_session=True
        )
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    shown = [tmp_path / "ranks" / str(rank) for rank in range(ranks)]
    while not all(path.exists() and path.read_text() for path in shown):
        assert launcher.poll() is None
        time.sleep(0.05)
    for number in numbers:
        os.killpg(launcher.pid, number)  # as the kernel does when the terminal closes
    (tmp_path / "go").touch()
    assert launcher.wait() == 0
    assert [path.read_text() for path in shown] == [" ".join(IGNORED)] * ranks


def test_in_process_launch_leaves_the_environment(
    write: Callable[[str, str], str], tmp_path: Path
) -> None:
    # In a separate interpreter: torch's launcher leaves its signal handlers installed.
    code = (
        "import os, sys; from accel_callbacks.cli.main import main; before = dict(os.environ)\n"
        "assert main(['launch', '--cpu', '--no_python', 'true']) == 0\n"
        "assert dict(os.environ) == before, set(os.environ) - set(before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _read_pid(path: Path, launcher: subprocess.Popen[str]) -> int:
    """Wait for a rank to write its process id."""
    while not path.exists():
        assert launcher.poll() is None
        time.sleep(0.05)
    return int(path.read_text())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
