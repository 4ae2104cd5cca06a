"""Reports of a failed rank, the environment of a script, and processes left by a launcher: none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_callbacks.launch import watchdog, worker
from accel_callbacks.launch.launch_folder import launch_folder

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

TWO = ["launch", "--cpu", "--num_processes", "2"]

BROKEN = """
import os, signal, sys, time
def deep():
    raise ValueError("boom on " + (os.environ["RANK"] if "all" in sys.argv else "one"))
if "all" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that it fails before it is stopped
if os.environ["RANK"] == "1" or "all" in sys.argv:
    deep()
time.sleep(1000)
"""

TRAINS = """
import sys, time
import torch
from accel_callbacks import Accelerator

how = sys.argv[1]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5 if how == "shape" else 4, 1)
    def forward(self, x):
        return self.layer(x)

def train():
    for index, batch in enumerate(data):
        loss = model(batch).sum()
        if index == 1 and accel.process_index == 1:
            raise ValueError("a broken image")
        accel.backward(loss)

accel = Accelerator(cpu=True)
model, data = accel.prepare(Net(), torch.utils.data.DataLoader(torch.ones(8, 4), 2))
if how == "plain":
    train()
try:
    with accel.run("demo", resume=False):
        train()
except ValueError:
    if how == "caught":
        time.sleep(1000)
    raise
"""

HOOKED = """
import sys
sys.excepthook = lambda kind, error, found: print("my own hook:", error, file=sys.stderr)
raise ValueError("boom")
"""

LOOKING = """
import atexit, multiprocessing, pickle, sys
import beside

class Thing: pass

def double(value): return 2 * value

if __name__ == "__main__":
    facts = [__file__, __spec__, sys.argv, sys.path[0], sys.modules["__main__"].Thing is Thing]
    facts += [pickle.loads(pickle.dumps(Thing())).__class__ is Thing, beside.VALUE]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        facts.append(pool.apply(double, (21,)))
    print(facts, sorted(name for name in globals() if not name.startswith("__")))
    atexit.register(lambda: print(Thing, double(1)))
"""

FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
path = "pid" + os.environ["RANK"]
with open(path + ".part", "w") as out:
    out.write(f"{os.getpid()} {child.pid}")
os.replace(path + ".part", path)
time.sleep(1000)
"""


def runner(*words: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """One process as the launcher starts it, without the launcher."""
    command = [sys.executable, "-u", worker.__file__, *words]
    env = {**os.environ, **extra}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.distributed
def test_the_traceback_of_the_failing_rank_comes_first(
    accel: Run, write: Callable[[str, str], str], tmp_path: Path
) -> None:
    done = accel(*TWO, write("breaks.py", BROKEN))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("rank 1 of 2 failed (local rank 1, pid ")
    assert lines[1] == "Traceback (most recent call last):"
    # The first frame is the script's own: nothing of the launcher stands in it.
    assert lines[2] == f'  File "{tmp_path}/breaks.py", line 8, in <module>'
    assert done.stderr.count("Traceback") == 1
    report = lines[lines.index("ValueError: boom on one") + 1 :]
    assert report[0].startswith("accel launch: breaks.py failed: rank 1 exited with code 1")
    assert report[1] == "  ValueError: boom on one"
    assert "elastic" not in done.stderr


@pytest.mark.distributed
def test_of_several_tracebacks_the_first_is_shown_again(
    warm_accel: Run, write: Callable[[str, str], str]
) -> None:
    done = warm_accel(*TWO, write("breaks.py", BROKEN), "all")
    report = done.stderr[done.stderr.index("accel launch: ") :]
    assert report.count("in deep") == 1


@pytest.mark.distributed
def test_an_error_of_all_ranks_is_told_once(
    warm_accel: Run, write: Callable[[str, str], str], tmp_path: Path
) -> None:
    done = warm_accel(*TWO, "--log_dir", "logs", write("trains.py", TRAINS), "shape")
    text = done.stderr
    assert done.returncode == 1
    lines = text[: text.index("accel launch: ")].splitlines()
    assert len(lines) <= 18, text
    assert [lines.count("Traceback (most recent call last):"), text.count("in forward")] == [1, 2]
    first, other = ("0", "1") if lines[0].startswith("rank 0 of 2 failed (") else ("1", "0")
    same = f"rank {other}: the same error as rank {first}, at trains.py:13"
    assert same in lines or f"then stopped by the launcher: rank {other}" in text
    assert f"failed: rank {first} exited with code 1" in text
    (whole,) = tmp_path.glob("logs/*/attempt_0/*/traceback.txt")
    assert str(whole.relative_to(tmp_path)) in text
    assert "in _call_impl" in whole.read_text()
    assert "in _call_impl" not in text


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["run", "plain"])
def test_a_rank_that_only_lost_another_is_a_line(
    warm_accel: Run, write: Callable[[str, str], str], how: str
) -> None:
    done = warm_accel(*TWO, write("trains.py", TRAINS), how)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    line = "rank 0: lost rank 1 in backward, at trains.py:20\n"
    assert line in done.stderr or "then stopped by the launcher: rank 0" in done.stderr
    assert "\nValueError: a broken image\n" in done.stderr
    assert "failed: rank 1 exited with code 1" in done.stderr


@pytest.mark.distributed
def test_the_error_of_a_rank_that_does_not_show_it_is_told_by_the_others(
    warm_accel: Run, write: Callable[[str, str], str]
) -> None:
    """With ``--quiet`` too, which leaves the report of the launcher out."""
    done = warm_accel(*TWO, "--quiet", write("trains.py", TRAINS), "caught")
    assert (done.returncode, "accel launch" in done.stderr) == (1, False)
    assert done.stderr.startswith("rank 0 of 2 failed ("), done.stderr
    error = done.stderr[done.stderr.index("accel_callbacks.errors.RemoteError: rank 1 failed in") :]
    assert "ValueError: a broken image" in error


@pytest.mark.distributed
def test_all_frames_of_all_ranks_are_shown_where_they_are_asked_for(
    warm_accel: Run, write: Callable[[str, str], str]
) -> None:
    done = warm_accel(*TWO, "--full_traceback", write("trains.py", TRAINS), "run")
    assert "lost rank" not in done.stderr
    assert "RemoteError: rank 1 failed" in done.stderr
    assert "step.py" in done.stderr


def test_the_script_finds_itself_as_under_python(
    write: Callable[[str, str], str], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    write("in/looks.py", LOOKING)
    write("in/beside.py", "VALUE = 7")
    plain = [sys.executable, "-u", "in/looks.py", "a", "--b"]
    alone = subprocess.run(plain, cwd=tmp_path, capture_output=True, text=True)
    ours = runner("script", "in/looks.py", "a", "--b", cwd=tmp_path)
    assert (alone.returncode, ours.returncode) == (0, 0), alone.stderr + ours.stderr
    assert ours.stdout == alone.stdout
    assert "42" in ours.stdout
    assert not (tmp_path / "in" / "__pycache__").joinpath("looks").exists()


def test_a_module_and_a_folder_run_as_under_python(
    write: Callable[[str, str], str], tmp_path: Path
) -> None:
    (tmp_path / "package").mkdir()
    text = "import os, sys; print(sys.argv, __name__, __package__, os.path.abspath(sys.path[0]))"
    for name in ("__init__", "train", "__main__"):
        write(f"package/{name}.py", text if name != "__init__" else "")
    for ours, plain in (
        (("module", "package.train", "x"), ("-m", "package.train", "x")),
        (("module", "package"), ("-m", "package")),
        (("script", "package", "y"), ("package", "y")),
    ):
        command = [sys.executable, *plain]
        alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert runner(*ours, cwd=tmp_path).stdout == alone.stdout != ""


def test_the_script_pays_for_nothing_of_ours(
    write: Callable[[str, str], str], tmp_path: Path
) -> None:
    script = write("loaded.py", "import sys; print(*sorted(sys.modules))")
    plain = [sys.executable, script]
    alone = subprocess.run(plain, cwd=tmp_path, capture_output=True, text=True)
    ours = runner("script", script, cwd=tmp_path)
    more = set(ours.stdout.split()) - set(alone.stdout.split())
    small = {"__future__", "faulthandler", "warnings", "importlib.machinery"}
    assert more <= small | {"importlib", "importlib._bootstrap", "importlib._bootstrap_external"}


def test_ends_as_python_does(write: Callable[[str, str], str], tmp_path: Path) -> None:
    cases = {
        "raise SystemExit(7)": (7, ""),
        "import sys; sys.exit('told')": (1, "told\n"),
        "def (:": (1, "SyntaxError: "),
        "import os; os.abort()": (-signal.SIGABRT, "Fatal Python error: Aborted"),
        HOOKED: (1, "my own hook: boom"),
    }
    for text, (code, shown) in cases.items():
        done = runner("script", write("ends.py", text), cwd=tmp_path)
        assert (text, done.returncode) == (text, code), done.stderr
        assert shown in done.stderr, text


def test_no_place_for_the_record_hides_nothing(
    write: Callable[[str, str], str], tmp_path: Path
) -> None:
    script = write("breaks.py", BROKEN)
    extra = {"RANK": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "absent" / "error.json")}
    done = runner("script", script, cwd=tmp_path, **extra)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: boom on one\n")


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_launcher_leaves_no_orphan(
    start: Start, write: Callable[[str, str], str], tmp_path: Path
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    launcher = start(*TWO, write("family.py", FAMILY), TMPDIR=str(place))
    pids = [pid for rank in range(2) for pid in read_pids(tmp_path / f"pid{rank}", launcher)]
    assert all(alive(pid) for pid in pids)
    (folder,) = place.glob("accel-launch-*")
    launcher.kill()
    launcher.communicate()  # no process of the launch holds its output either
    while [pid for pid in pids if alive(pid)]:
        time.sleep(0.05)
    with launch_folder(place):  # of the next launch
        assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_ignores_sigterm_is_killed_and_others_are_left_alone() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(1, flush=True); time.sleep(1000)"
    )
    ours, other = (
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, watchdog.MARK: mark},
            stdout=subprocess.PIPE,
        )
        for mark in ("ours", "other")
    )
    try:
        for process in (ours, other):
            assert process.stdout is not None
            process.stdout.readline()
        # Not reaped yet, so it is a zombie, which has no environment any more.
        watchdog.end_marked("ours", grace=0.2)
        assert ours.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        for process in (ours, other):
            process.communicate()


def read_pids(path: Path, launcher: subprocess.Popen[str]) -> list[int]:
    """Wait for a rank to write the ids of its family."""
    while not path.exists():
        assert launcher.poll() is None
        time.sleep(0.05)
    return [int(word) for word in path.read_text().split()]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
