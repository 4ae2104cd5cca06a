"""A worker that is forked for a restart is to its script, and to its launcher, a new process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("workers are forked on Linux", allow_module_level=True)

from accel_callbacks.launch import fork_server, worker
from accel_callbacks.launch.fork_server import ForkServer
from accel_callbacks.launch.watchdog import MARK, end_marked
from accel_callbacks.launch_notes import IMPORTS, VARIABLE, WARM
from tests.cli.conftest import clean_environment

RANK = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "1"}
Serve = Callable[..., ForkServer]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a server for a program, whose first attempt has imported some installed modules."""
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    servers: list[ForkServer] = []

    def start(
        *words: str,
        changed: dict[str, str] | None = None,
        waits: bool = True,
        installed: dict[str, str] | None = None,
        **sources: str,
    ) -> ForkServer:
        modules = {"json": json.__file__, "random": sys.modules["random"].__file__}
        modules |= installed or {}
        for name, source in sources.items():
            (packages / f"{name}.py").write_text(source)
            modules[name] = str(packages / f"{name}.py")
        notes = tmp_path / "notes"
        notes.mkdir(exist_ok=True)
        (notes / IMPORTS).write_text(json.dumps({"modules": modules, "changed": changed or {}}))
        monkeypatch.setenv(VARIABLE, str(notes))
        server = ForkServer(notes)
        servers.append(server)
        server.worker_started(command(*words), {**os.environ, **RANK})
        server.look()
        if waits:
            await_server(server)
        return server

    yield start
    for server in servers:
        server.close()


def await_server(server: ForkServer) -> None:
    """Wait until a server forks, or has given up."""
    deadline = time.monotonic() + 60
    while not (server.ready or server._gave_up) and time.monotonic() < deadline:
        server.look()
        time.sleep(0.01)


def command(*words: str) -> list[str]:
    return [sys.executable, "-u", worker.__file__, *words]


def forked(server: ForkServer, *words: str, **variables: str) -> tuple[int, str, str]:
    """Run a program in a fork; return its exit code, output and errors."""
    with open("out", "w+") as out, open("err", "w+") as err:
        streams = (out.fileno(), err.fileno())
        process = server.fork(command(*words), {**os.environ, **RANK, **variables}, streams)
        assert process is not None, server.reason
        code = process.wait(60)
        return code, Path("out").read_text(), Path("err").read_text()


def started_anew(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(*words),
        env={**os.environ, **RANK},
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,  # as torch's launcher does
    )
    return done.returncode, done.stdout, done.stderr


PROGRAMS = {
    "identity": "import sys, os; print(__name__, __file__, sys.argv, sys.orig_argv, sys.path,\n"
    "os.getcwd(), sys.flags, sorted(sys.modules['__main__'].__dict__))",
    "variables": "import os; print(sorted(os.environ.items()))",
    "process": "import os, signal, resource; print(os.getsid(0) == os.getpid() == os.getpgid(0),\n"
    "len(os.listdir('/proc/self/task')), sorted(os.listdir('/proc/self/fd')),\n"
    "[signal.getsignal(n) for n in range(1, 32)], signal.pthread_sigmask(signal.SIG_BLOCK, []),\n"
    "resource.getrlimit(resource.RLIMIT_NOFILE), os.getppid())",
    "streams": "import sys; print(sys.stdout.name, sys.stdout.encoding, sys.stderr.errors,\n"
    "sys.stdout.write_through, sys.stdin.isatty()); sys.stderr.write('to the other')",
    "error": "def f():\n    1 / 0\nf()",
    "chained": "try:\n    1 / 0\nexcept Exception:\n    raise ValueError('x') from None",
    "import": "import no_such_package",
    "syntax": "if True print(1)",
    "code": "import sys; sys.exit(7)",
    "message": "import sys; sys.exit('why')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15); import time; time.sleep(60)",
    "abrupt": "import os; print('lost'); os._exit(3)",
    "handlers": "import atexit; atexit.register(print, 'bye'); print('hello')",
    "thread": "import threading as t, time\n"
    "t.Thread(target=lambda: (time.sleep(0.1), print('done'))).start()",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_in_a_new_process(serve: Serve, tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "program.py").write_text(PROGRAMS[name])
    words = ("script", "in/program.py", "a", "--b", "$c")
    fork = forked(serve(*words), *words)
    new = started_anew(*words)
    assert fork[0] == new[0]
    assert [_without_pid(text) for text in fork[1:]] == [_without_pid(text) for text in new[1:]]


def _without_pid(text: str) -> str:
    return re.sub(r"pid \d+", "pid N", text)


def test_a_module_finds_what_is_beside_it(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("here = __file__\n")
    (tmp_path / "module.py").write_text(
        "import beside, sys; print(beside.here, sys.argv, __spec__.name)"
    )
    words = ("module", "module", "a")
    assert forked(serve(*words), *words) == started_anew(*words)


def test_forks_have_the_imports_and_random_numbers_of_their_own(
    serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "draw.py").write_text(
        "import sys; print('numpy' in sys.modules, 'good' in sys.modules, end=' ')\n"
        "import os, random, numpy as np\n"
        "print(random.random(), np.random.rand(), os.environ['RANK'])"
    )
    words = ("script", "draw.py")
    server = serve(*words, good="import numpy.random\n")
    first, second = (forked(server, *words, RANK=rank)[1].split() for rank in "01")
    assert first[:2] == second[:2] == ["True", "True"]
    assert len({*first[2:], *second[2:]}) == 6
    assert server.forks == 2


EFFECTS = {
    "starts a thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "starts a process": "import subprocess; process = subprocess.Popen(['sleep', '3'])",
    "opens /": "file = open(__file__)",
    "sets up logging": "import logging; logging.basicConfig()",
    "draws from the generator of random": "import random; PORT = random.randrange(1024, 65536)",
    "reads RANK": "import os; is_main = os.environ.get('RANK') == '0'",
    "fails: ": "raise ImportError('not today')",
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_package_that_no_fork_may_share_is_left_out(
    serve: Serve, tmp_path: Path, effect: str
) -> None:
    (tmp_path / "program.py").write_text(
        "import sys; print(*(name in sys.modules for name in ('before', 'bad', 'asks', 'good')))"
    )
    words = ("script", "program.py")
    server = serve(*words, before="", bad=EFFECTS[effect], asks="import bad", good="")
    assert server.ready, server.reason
    assert forked(server, *words)[1] == "True False False True\n"


def test_an_effect_that_only_the_server_has_is_refused(serve: Serve, tmp_path: Path) -> None:
    bad = (
        "import os, threading, time\n"
        "if 'seen' not in os.listdir():\n"
        "    open('seen', 'w').close()\n"
        "else:\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    server = serve("script", "program.py", bad=bad)
    assert not server.ready
    assert "the import of bad starts a thread, so a fork" in server.reason


def test_a_package_that_ends_the_process_is_left_out(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print('good' in sys.modules)")
    words = ("script", "program.py")
    server = serve(*words, bad="import os, signal; os.kill(os.getpid(), signal.SIGKILL)", good="")
    assert forked(server, *words)[1] == "True\n"


def test_a_scout_ends_with_its_server(serve: Serve, tmp_path: Path) -> None:
    slow = "import os, time; open('scout', 'w').write(str(os.getpid())); time.sleep(1)"
    later = "open('later', 'w').close()"
    server = serve("script", "program.py", waits=False, slow=slow, later=later)
    deadline = time.monotonic() + 60
    while not (Path("scout").exists() and Path("scout").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.close()
    while Path("/proc", Path("scout").read_text()).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not Path("later").exists()


def test_forks_have_pyarrow_whose_memory_pool_starts_a_thread(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.delenv("JE_ARROW_MALLOC_CONF", raising=False)
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "print('pyarrow' in sys.modules, os.environ.get('JE_ARROW_MALLOC_CONF'),\n"
        "      len(os.listdir('/proc/self/task')))\n"
        "import pyarrow as pa\n"
        "pool = pa.jemalloc_memory_pool()\n"
        "kept = [pa.array(range(9999), memory_pool=pool) for _ in range(99)]\n"
        "print(sum(len(array) for array in kept), pool.bytes_allocated() > 0)\n"
    )
    words = ("script", "program.py")
    server = serve(*words, good="import pyarrow\n")
    assert forked(server, *words)[:2] == (0, "True None 1\n989901 True\n")


def test_forks_have_rich_which_draws_ids_for_links(serve: Serve, tmp_path: Path) -> None:
    style = pytest.importorskip("rich.style")
    (tmp_path / "program.py").write_text(
        "import random, sys; print('shows' in sys.modules, random.random())"
    )
    words = ("script", "program.py")
    before, after = "import rich.console\n", "import rich.progress\n"
    server = serve(*words, logs=before, installed={"rich.style": style.__file__}, shows=after)
    ended = [forked(server, *words)[:2] for _ in range(2)]
    assert [(code, text.split()[0]) for code, text in ended] == [(0, "True")] * 2
    assert ended[0] != ended[1]  # a fork draws its own numbers


def test_forks_of_a_sharded_training_have_what_a_resume_imports(
    serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(
        "import sys; print('torch.distributed.checkpoint' in sys.modules)"
    )
    words = ("script", "program.py")
    server = serve(*words, good="import torch.distributed.tensor\n")
    assert forked(server, *words)[:2] == (0, "True\n")


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"HF_HOME": "/models"}, "the script sets HF_HOME"),
        ({"OMP_NUM_THREADS": "99"}, "the script sets OMP_NUM_THREADS"),
        ({"TOKENIZERS_PARALLELISM": "false"}, None),
        ({"OF_A_PACKAGE": "1"}, None),
    ],
)
def test_a_variable_that_the_script_sets_before_imports_is_seen_by_them(
    serve: Serve, changed: dict[str, str], refused: str | None
) -> None:
    reader = "import os; HOME = os.environ.get('HF_HOME'); os.environ['OF_A_PACKAGE'] = '1'"
    server = serve("script", "program.py", changed=changed, reader=reader)
    assert server.ready == (refused is None)
    assert refused is None or refused in server.reason


def test_a_module_of_the_user_is_imported_by_each_fork(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "program.py").write_text("import sys; print('mine' in sys.modules)")
    words = ("script", "program.py")
    server = serve(*words)
    note = json.loads((tmp_path / "notes" / IMPORTS).read_text())
    note["modules"]["mine"] = str(tmp_path / "mine.py")
    (tmp_path / "notes" / IMPORTS).write_text(json.dumps(note))
    server = serve(*words)
    assert forked(server, *words)[1] == "False\n"


def test_another_file_of_the_same_name_is_refused(serve: Serve, tmp_path: Path) -> None:
    server = serve("script", "program.py", good="")
    assert server.ready
    note = json.loads((tmp_path / "notes" / IMPORTS).read_text())
    note["modules"]["good"] = note["modules"]["good"].replace("good.py", "good/__init__.py")
    (tmp_path / "notes" / IMPORTS).write_text(json.dumps(note))
    again = ForkServer(tmp_path / "notes")
    again.worker_started(command("script", "program.py"), {**os.environ, **RANK})
    deadline = time.monotonic() + 60
    while not (again.ready or again._gave_up) and time.monotonic() < deadline:
        again.look()
        time.sleep(0.01)
    assert not again.ready
    assert "good is another file" in again.reason


def test_a_worker_of_another_kind_is_started_anew(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    server = serve("script", "program.py")
    environment = {**os.environ, **RANK}
    assert server.fork(command("script", "other.py"), environment, (1, 2)) is None
    assert server.fork(command("script", "program.py"), {**environment, "NEW": "1"}, (1, 2)) is None
    assert "in another way" in server.reason
    process = server.fork(command("script", "program.py"), environment, (1, 2))
    assert process is not None
    assert process.wait(60) == 0


def test_a_system_without_subreapers(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text("import time; time.sleep(60)")
    words = ("script", "program.py")
    server = serve(*words)
    environment = {**os.environ, **RANK}
    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "_subreaper", nullcontext)
        assert server.fork(command(*words), environment, (1, 2)) is None
    assert "adopt" in server.reason


def test_a_server_that_is_killed_is_started_again(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('done')")
    words = ("script", "program.py")
    server = serve(*words)
    environment = {**os.environ, **RANK}
    for _ in range(fork_server._MOST_LOSSES):
        assert server._process is not None
        server._process.send_signal(signal.SIGKILL)
        assert server.fork(command(*words), environment, (1, 2)) is None
        assert server.reason == (
            "the fork server was killed by SIGKILL, and another one was not ready yet"
        )
        await_server(server)
        assert forked(server, *words)[:2] == (0, "done\n")
    server._process.send_signal(signal.SIGKILL)
    assert server.fork(command(*words), environment, (1, 2)) is None
    assert server.reason == "the fork server was killed by SIGKILL"
    assert server._gave_up


def test_the_watchdog_of_a_launch_ends_forks_and_their_server(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, "of-this-test")
    (tmp_path / "program.py").write_text("import time; time.sleep(60)")
    words = ("script", "program.py")
    server = serve(*words)
    process = server.fork(command(*words), {**os.environ, **RANK}, (1, 2))
    assert process is not None
    assert server._process is not None
    threading.Thread(target=end_marked, args=("of-this-test", 30.0), daemon=True).start()
    assert process.wait(30) == -signal.SIGTERM
    assert server._process.wait(30) == -signal.SIGTERM


# --- with two real processes --------------------------------------------------------------------

SCRIPT = f"""
import json, os, random, signal, sys, time
facts = {{
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "cwd": os.getcwd(),
    "orig_argv": sys.orig_argv, "fds": sorted(os.listdir("/proc/self/fd")),
    "leads": os.getsid(0) == os.getpid(),
    "launcher": "accel_callbacks.cli" in open(f"/proc/{{os.getppid()}}/cmdline").read(),
    "handlers": [str(signal.getsignal(number)) for number in range(1, 32)],
    "stdout": [sys.stdout.name, sys.stdout.isatty()],
    "variables": {{k: v for k, v in os.environ.items() if k not in (
        "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "ACCEL_LAUNCH_ID",
        "{VARIABLE}", "PWD", "OLDPWD")}},
}}
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
warm = "torch" in sys.modules
import numpy, torch
drawn = [random.random(), float(numpy.random.rand())]
facts["torch"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
drawn += [torch.rand(1).item()] * (torch.initial_seed() != 67280421310721)
from accel_callbacks import Accelerator, set_seed
from accel_callbacks.callbacks import Checkpoint
set_seed(0)
folder = sys.argv[1]
accel = Accelerator(cpu=True, project_dir=folder, callbacks=[Checkpoint(every_n_steps=2)])
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=2, shuffle=True)
model, optimizer, data = accel.prepare(model, optimizer, data)
print("output of rank", rank, "in attempt", attempt)
with accel.run("warm") as run:
    begins = run.global_step
    for batch in data:
        accel.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if folder != "whole" and attempt == "0" and run.global_step == 5:
            deadline = time.monotonic() + 90
            note = os.path.join(os.environ["{VARIABLE}"], "{WARM}")
            while folder == "warm" and not os.path.exists(note) and time.monotonic() < deadline:
                time.sleep(0.05)
            if rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)
accel.save_model(model, f"{{folder}}/model")
with open(f"{{folder}}-{{rank}}.json", "w") as file:
    json.dump([warm, attempt, begins, drawn, facts], file)
accel.end_training()
"""


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_a_restart_from_forks_is_one_from_new_processes_and_changes_no_weight(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**clean_environment(tmp_path), "OMP_NUM_THREADS": "3"}
    launch = [
        sys.executable,
        "-m",
        "accel_callbacks.cli",
        "launch",
        "--cpu",
        "--num_processes",
        "2",
    ]
    logged = ["--max_restarts", "1", "--log_dir", "logs", "--redirects", "3", "train.py"]
    options: dict[str, Any] = {
        "cwd": tmp_path, "env": environment, "text": True,
        "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
    }  # fmt: skip
    with (
        subprocess.Popen([*launch, *logged, "warm"], **options) as forks,
        subprocess.Popen([*launch, "--no_warm_workers", *logged, "whole"], **options) as whole,
    ):
        printed = [process.communicate(timeout=200)[0] for process in (forks, whole)]
        assert [process.returncode for process in (forks, whole)] == [0, 0], printed
    assert "attempt 2 begins" in printed[0]
    assert "imported already" in printed[0]
    draws = []
    for rank in range(2):
        ended = [
            json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("warm", "whole")
        ]
        assert [facts[:2] for facts in ended] == [[True, "1"], [False, "0"]]
        assert ended[0][2] in (2, 4)
        fork, new = (facts[4] for facts in ended)
        assert fork.pop("argv")[1:] == ["warm"]
        assert new.pop("argv")[1:] == ["whole"]
        assert fork.pop("orig_argv")[:-1] == new.pop("orig_argv")[:-1]
        variables = [set(facts.pop("variables").items()) for facts in (fork, new)]
        # A variable that a package sets when it is imported is there from the start.
        assert {name for name, _ in variables[0] ^ variables[1]} <= {
            "ACCEL_LAUNCH_MEMORY",  # of each launch
            "TORCHELASTIC_RESTART_COUNT",
            "TORCHINDUCTOR_CACHE_DIR",
        }
        assert fork == new
        draws += ended[0][3]
    assert len(set(draws)) == len(draws) >= 4
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("warm", "whole")
    ]
    assert weights[0] == weights[1]
    logs = [log.read_text() for log in (tmp_path / "logs").glob("*/attempt_1/*/stdout.log")]
    assert sorted(logs) == [f"output of rank {rank} in attempt 1\n" for rank in range(2)]


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fork_trains_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("cpu=True, ", "").replace('"1":', '"0":'))
    options = ["--num_processes", "1", "--max_restarts", "1", "--warm_workers"]
    done = subprocess.run(
        [sys.executable, "-m", "accel_callbacks.cli", "launch", *options, "train.py", "warm"],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "imported already" in done.stderr
    ended = json.loads((tmp_path / "warm-0.json").read_text())
    assert ended[:2] == [True, "1"]
    assert ended[2] in (2, 4)
