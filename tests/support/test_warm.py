"""A fork of the warm Python is to whoever starts it what a fresh Python is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fresh ones are started there")

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, __name__, sys.path[0])",
    "place": "import os; print(os.getcwd(), sorted(os.environ))",
    "error": "def f():\n    1 / 0\nf()",
    "chained": "try:\n    1 / 0\nexcept Exception:\n    raise ValueError('x') from None",
    "code": "import sys; sys.exit(7)",
    "message": "import sys; sys.exit('why')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15); input(); input()",
    "abrupt": "import os; print('lost'); os._exit(3)",
    "handlers": "import atexit; atexit.register(print, 'bye'); print('hello')",
    "hook": "import atexit, sys; atexit.register(lambda: print(repr(sys.last_value))); 1 / 0",
    "thread": "import threading as t, time\n"
    "t.Thread(target=lambda: (time.sleep(0.1), print('done'))).start()",
    "deleted": "class A:\n    def __del__(self): print('deleted')\na = A()",
    "streams": "import sys; print(sys.stdout.name, sys.stdout.encoding, sys.stderr.errors)\n"
    "sys.stderr.write('to the other')\nprint(input())",
    "session": "import os; print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())",
    "limits": "import resource, signal; print(resource.getrlimit(resource.RLIMIT_NOFILE),\n"
    "signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, []))",
}
Done = tuple[int, str, str]


def run(kind: Any, words: list[str], folder: Path, **options: Any) -> Done:
    done = kind.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "ONLY": "here"},
        input="typed\n",
        capture_output=True,
        text=True,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


def test_code_ends_as_in_a_fresh_one(tmp_path: Path) -> None:
    cases = {name: ["-c", text, "a", "--b"] for name, text in PROGRAMS.items()}
    fresh = {name: run(subprocess, words, tmp_path) for name, words in cases.items()}
    assert {name: run(warm, words, tmp_path) for name, words in cases.items()} == fresh
    done = run(warm, cases["deleted"], tmp_path, destructors=True)
    assert done == fresh["deleted"]


def test_a_script_and_a_module_run_as_in_a_fresh_one(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "beside.py").write_text("here = __file__\n")
    text = "import sys, beside; print(sys.argv, __file__, __name__, beside.here)\nraise KeyError\n"
    (tmp_path / "in" / "script.py").write_text(text)
    (tmp_path / "beside.py").write_text("here = 'the folder'\n")
    (tmp_path / "module.py").write_text(text)
    for words in (["in/script.py", "a"], ["-m", "module", "a"], ["-u", "in/script.py"]):
        mine, fresh = (run(kind, words, tmp_path) for kind in (warm, subprocess))
        assert mine[:2] == fresh[:2]
        assert mine[2].splitlines()[-3:] == fresh[2].splitlines()[-3:]


def test_it_is_a_child_with_torch_and_random_numbers_of_its_own() -> None:
    code = (
        "import os, random, sys; import numpy as np\n"
        "print(os.getppid(), 'torch' in sys.modules, len(os.listdir('/proc/self/task')))\n"
        "import torch; print(torch.rand(1).item())\nprint(random.random(), np.random.rand())"
    )
    first, second = (run(warm, ["-c", code], Path.cwd())[1].splitlines() for _ in range(2))
    assert first[0] == second[0] == f"{os.getpid()} True 1"
    assert first[1] == second[1]  # torch begins with the same seed in each process
    assert first[2] != second[2]


def test_signals_reach_it_and_its_group() -> None:
    code = "import time; print('up', flush=True); time.sleep(1e6)"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with warm.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            assert process.stdout.read(3) == b"up\n"
            os.killpg(process.pid, number)
            assert process.wait() == -number


def test_children_of_a_launcher_are_its_children_and_are_warm() -> None:
    child = "import os, sys; print(os.getppid(), 'torch' in sys.modules, flush=True); sys.exit(3)"
    code = (
        "import os, subprocess, sys\n"
        f"done = subprocess.run([sys.executable, '-c', {child!r}])\n"
        "print(os.getpid(), done.returncode)"
    )
    _, out, err = run(warm, ["-c", code], Path.cwd(), warm_children=True)
    (parent, has_torch), (pid, status) = (line.split() for line in out.splitlines())
    assert (parent, has_torch, status) == (pid, "True", "3"), err


def test_what_a_fork_cannot_be_is_a_fresh_one() -> None:
    code = "import sys; print('torch' in sys.modules, sys.flags.isolated, sys.flags.utf8_mode)"
    for words in (["-I", "-c", code], ["-X", "utf8", "-c", code]):
        done = warm.run([sys.executable, *words], capture_output=True, text=True)
        assert done.stdout.startswith("False")
    environment = {**os.environ, "OMP_NUM_THREADS": "2,1"}  # of nested regions
    done = warm.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("False")


def test_it_computes_with_the_threads_of_its_environment() -> None:
    code = "import torch; x = torch.rand(400, 400); print((x @ x).isfinite().all().item(), "
    code += "torch.get_num_threads())"
    for threads in ("1", "2"):
        done = warm.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == ["True", threads], done


def test_a_server_does_not_outlive_whoever_it_serves() -> None:
    code = (
        "import os, sys; from tests.support import warm\n"
        "from pathlib import Path\n"
        "print(Path(f'/proc/self/task/{os.getpid()}/children').read_text(), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = warm.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        warm_children=True,
    )
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)
