"""The launchers for notebooks, on real forks of this process."""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_callbacks import Accelerator, PartialState, RemoteError, debug_launcher
from accel_callbacks import notebook_launcher as launch
from accel_callbacks.distributed.topology import destroy_topology, is_initialized
from accel_callbacks.launch import functions, notebook
from accel_callbacks.launch.functions import FunctionLaunch

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that nothing has settled, and that a launch leaves as it was."""
    for name in ("ACCEL_MIXED_PRECISION", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCEL_CPU", "1")
    destroy_topology()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = dict(os.environ), [signal.getsignal(number) for number in numbers]
    yield
    changed = {name for name, _ in set(before[0].items()) ^ set(os.environ.items())}
    by_tests = {"PYTEST_CURRENT_TEST", "ACCEL_MIXED_PRECISION", "ACCEL_CPU"}
    assert changed <= by_tests
    assert [signal.getsignal(number) for number in numbers] == before[1]
    assert multiprocessing.active_children() == []
    destroy_topology()


# --- what comes back ---------------------------------------------------------------------------


def test_a_start_that_fails_half_way_ends_the_processes_that_have_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forks = []

    def fork_once() -> int:
        if forks:
            raise BlockingIOError("no more processes")
        forks.append(True)
        return fork()

    fork = os.fork
    monkeypatch.setattr(os, "fork", fork_once)
    with pytest.raises(BlockingIOError, match="no more processes"):
        launch(signal.pause, num_processes=2)
    assert forks
    assert multiprocessing.active_children() == []


@pytest.mark.first
def test_each_process_trains_and_returns_its_value() -> None:
    def train(size: int, *, scale: float = 2.0) -> dict[str, Any]:
        accel = Accelerator()
        model = accel.prepare(torch.nn.Linear(size, 1))
        accel.backward(model(torch.ones(2, size) * (accel.process_index + 1)).sum() * scale)
        (gradient,) = {tuple(model.module.weight.grad[0].tolist())}
        return {"rank": accel.process_index, "gradient": gradient, "pid": os.getpid()}

    found = launch(train, (3,), num_processes=2)
    assert [one["rank"] for one in found] == [0, 1]
    assert [one["gradient"] for one in found] == [(6.0, 6.0, 6.0)] * 2
    assert len({os.getpid(), *(one["pid"] for one in found)}) == 3


@pytest.mark.parametrize(
    ("processes", "given", "variable", "argument", "expected"),
    [
        (2, "bf16", "fp8", None, "bf16"),
        (1, "bf16", "fp8", None, "bf16"),
        (1, None, "bf16", None, "bf16"),
        (1, None, None, None, "no"),
        (1, "bf16", None, "no", "no"),
    ],
)
def test_mixed_precision_reaches_the_accelerator(
    monkeypatch: pytest.MonkeyPatch,
    processes: int,
    given: str | None,
    variable: str | None,
    argument: str | None,
    expected: str,
) -> None:
    if variable:
        monkeypatch.setenv("ACCEL_MIXED_PRECISION", variable)

    def precision() -> tuple[str, torch.dtype]:
        accel = Accelerator(mixed_precision=argument)
        model = accel.prepare(torch.nn.Linear(2, 2))
        with accel.autocast():
            return accel.mixed_precision, (model(torch.ones(1, 2)) @ torch.ones(2, 2)).dtype

    dtype = torch.bfloat16 if expected == "bf16" else torch.float32
    found = launch(precision, num_processes=processes, mixed_precision=given)
    assert found == [(expected, dtype)] * processes
    assert os.environ.get("ACCEL_MIXED_PRECISION") == variable


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_of_any_type_come_back() -> None:
    def tensors() -> dict[str, Any]:
        weight = torch.nn.Linear(2, 2).weight
        return {
            "bf16": [torch.arange(3, dtype=torch.bfloat16)],
            "bool": (torch.tensor([True, False]),),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(1.5),
            "view": torch.arange(6).reshape(2, 3).t(),
            "graph": (weight.sum() * 0 + 4),
            "complex": torch.tensor([1 + 2j]).conj(),
            "sparse": torch.eye(2).to_sparse_csr(),
            "object": argparse.Namespace(many=[torch.tensor(one) for one in range(100)]),
            "model": torch.nn.Linear(2, 2).requires_grad_(False),
        }

    for got in debug_launcher(tensors):
        assert got["bf16"][0].tolist() == [0, 1, 2]
        assert got["bf16"][0].dtype is torch.bfloat16
        assert got["bool"][0].tolist() == [True, False]
        assert got["empty"].shape == (0, 3)
        assert got["scalar"].shape == ()
        assert got["view"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert got["graph"].item() == 4
        assert got["complex"].tolist() == [1 - 2j]
        assert got["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
        assert [one.item() for one in got["object"].many] == list(range(100))
        assert not any(one.is_shared() for one in got["object"].many)  # each an open file
        assert [one.requires_grad for one in got["model"].parameters()] == [False, False]
        got["scalar"] += 1  # it has its own memory


def test_what_cannot_come_back_is_named() -> None:
    with pytest.raises(RemoteError, match="returned a function that cannot be sent") as caught:
        debug_launcher(lambda: lambda: 1)
    assert "Return numbers" in str(caught.value)


def test_a_quiet_exit_is_none() -> None:
    assert debug_launcher(lambda: sys.exit(None if os.environ["RANK"] == "0" else 0)) == [None] * 2


# --- failures ----------------------------------------------------------------------------------


def waits_for(ending: Callable[[], None]) -> Callable[[], None]:
    """Rank 1 ends in some way, while rank 0 is in a collective."""

    def train() -> None:
        accel = Accelerator()
        accel.wait_for_everyone()
        if accel.process_index == 1:
            ending()
        accel.wait_for_everyone()
        time.sleep(1000)

    return train


def no_data() -> None:
    raise ValueError("no data")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.first
def test_the_first_error_is_raised_with_its_traceback() -> None:
    with pytest.raises(RemoteError, match="rank 1 failed in notebook_launcher") as caught:
        launch(waits_for(no_data), num_processes=2)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.endswith("ValueError: no data")
    assert 'raise ValueError("no data")' in text
    assert "accel_callbacks" not in text


def test_a_killed_process_is_named_and_not_its_peer() -> None:
    with pytest.raises(RemoteError, match=r"rank 1 failed.* killed.*out of memory") as caught:
        launch(waits_for(killed), num_processes=2)
    assert caught.value.rank == 1


def test_an_error_that_only_repeats_another_counts_as_that_ranks() -> None:
    def train() -> None:
        if os.environ["RANK"] == "0":
            raise RemoteError(rank=1, where="run", details="ValueError: no data")
        signal.pause()  # until the launcher ends it

    with pytest.raises(RemoteError, match="ValueError: no data") as caught:
        debug_launcher(train)
    assert caught.value.rank == 1


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGTERM])
def test_a_rank_aborted_after_an_error_does_not_hide_it(tmp_path: Path, number: int) -> None:
    """The watchdogs of NCCL and gloo abort a process whose peer is gone."""
    launch = FunctionLaunch(launcher="here", processes=2)
    error = functions._first_error(launch, tmp_path, [None, -number])
    assert error.rank == 1
    assert str(error).endswith(f"killed by {signal.Signals(number).name}")
    report = {"rank": 0, "when": 1.0, "repeats": False, "text": "ValueError: no data"}
    (tmp_path / "0.json").write_text(json.dumps(report))
    error = functions._first_error(launch, tmp_path, [1, -number])
    assert error.rank == 0
    assert str(error).endswith("ValueError: no data")


def test_an_exit_code_is_reported() -> None:
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        debug_launcher(sys.exit, (3,))
    with pytest.raises(RemoteError, match="exited with code 4"):
        debug_launcher(os._exit, (4,))


def test_an_interrupted_process_ends_the_launch() -> None:
    def interrupted() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)

    with pytest.raises(RemoteError, match=r"rank 1 failed.*code 130"):
        debug_launcher(interrupted)


def test_restarts_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    def flaky() -> str:
        accel = Accelerator()
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0" and accel.process_index == 1:
            raise OSError("disk away")
        accel.wait_for_everyone()
        return attempt

    assert launch(flaky, num_processes=2, max_restarts=1) == ["1", "1"]
    printed = capfd.readouterr().err
    assert "rank 1 failed in notebook_launcher:" in printed
    assert "OSError: disk away" in printed


def test_a_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    def train() -> None:
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(1000)

    launcher = multiprocessing.get_context("fork").Process(target=debug_launcher, args=(train,))
    launcher.start()
    try:
        pids = [_number_in(tmp_path / str(rank)) for rank in range(2)]
        launcher.kill()
        _until(lambda: not any(_alive(pid) for pid in pids))
    finally:
        launcher.kill()
        launcher.join()


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    """In a script, where all processes get it; the tests of the kernel have it in a notebook."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, pathlib, time
            from accel_callbacks import Accelerator, debug_launcher

            def train():
                accel = Accelerator()
                pathlib.Path(f"pid{accel.process_index}").write_text(str(os.getpid()))
                time.sleep(1000)

            try:
                debug_launcher(train)
            except KeyboardInterrupt:
                print("interrupted")
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pids = [_number_in(tmp_path / f"pid{rank}") for rank in range(2)]
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate()
        assert (out, "Traceback" in err) == ("interrupted\n", False)
        _until(lambda: not any(_alive(pid) for pid in pids))
    finally:
        _kill_group(process.pid)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _until(true: Callable[[], object]) -> None:
    while not true():
        time.sleep(0.05)


def _number_in(path: Path) -> int:
    _until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"function": None}, TypeError, r"write notebook_launcher\(train, args=\(...\)\)"),
        ({"args": "abc"}, TypeError, r"write args=\('abc',\)"),
        ({"args": 3}, TypeError, r"write args=\(3,\)"),
        ({"num_processes": 0}, ValueError, "at least 1"),
        ({"num_processes": "2"}, TypeError, "a whole number"),
        ({"node_rank": 1}, ValueError, "below num_nodes=1"),
        ({"mixed_precision": "bf61"}, ValueError, "Did you mean 'bf16'"),
        ({"num_processes": True}, TypeError, "a whole number"),
        ({"node_rank": "0"}, TypeError, "node_rank='0' must be a whole number"),
        ({"max_restarts": -1}, ValueError, "max_restarts=-1 must be at least 0"),
        ({"use_port": "x", "num_processes": 2}, ValueError, "must be a number"),
        ({"use_port": 70000, "num_processes": 2}, ValueError, "a number up to 65535"),
        ({"use_port": 0, "num_nodes": 2}, ValueError, "cannot agree on a free port"),
        ({"rdzv_backend": "c10d", "num_nodes": 2}, ValueError, "for one machine.*node_rank="),
        ({"max_restarts": 1, "num_nodes": 2}, ValueError, "for one machine.*accel launch"),
        ({"rdzv_endpoint": "node0"}, ValueError, "must be a number"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        launch(**{"function": print, **arguments})


@pytest.mark.parametrize(
    ("launcher", "make"), [(launch, Accelerator), (debug_launcher, PartialState)]
)
def test_an_accelerator_made_before_is_refused(
    launcher: Callable[..., Any], make: type[Any]
) -> None:
    make()
    with pytest.raises(RuntimeError, match="already made in this process"):
        launcher(print, num_processes=2)
    PartialState().destroy_process_group()  # as the text advises
    assert launcher(int, num_processes=2) == [0, 0]


def test_debug_launcher_checks_its_number() -> None:
    with pytest.raises(TypeError, match="num_processes='2' must be a whole number"):
        debug_launcher(print, num_processes="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_processes=0 must be at least 1"):
        debug_launcher(print, num_processes=0)


def test_a_process_group_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="in a process group already"):
            launch(print, num_processes=2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("found", "error", "text"),
    [
        ((0, True), RuntimeError, "already used in this process.*Restart the kernel"),
        ((1, False), ValueError, "shows 1 devices"),
        (None, RuntimeError, r"died.*nvidia-smi"),
    ],
    ids=["used", "too few", "a driver that kills the fork"],
)
def test_devices_that_forks_cannot_have(
    monkeypatch: pytest.MonkeyPatch,
    found: tuple[int, bool] | None,
    error: type[Exception],
    text: str,
) -> None:
    """Test the error texts; counting itself needs a device (below)."""
    monkeypatch.delenv("ACCEL_CPU")
    monkeypatch.setattr(notebook, "_count_devices", Count(found))
    with pytest.raises(error, match=text):
        launch(print, num_processes=2)


class Count:
    """Stands for the count of devices in the fork, to which it is sent."""

    def __init__(self, found: tuple[int, bool] | None) -> None:
        self._found = found

    def __call__(self) -> tuple[int, bool]:
        if self._found is None:
            os._exit(1)
        return self._found


def test_port_0_is_a_free_one() -> None:
    found = launch(os.environ.get, ("MASTER_PORT",), num_processes=2, use_port=0)
    assert len(set(found)) == 1
    assert found[0] not in ("0", "29500")


def test_a_taken_port_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RuntimeError, match=r"is taken.*use_port"):
            launch(print, num_processes=2, use_port=taken.getsockname()[1])


# --- one process, several machines, devices -----------------------------------------------------


def test_one_process_is_this_one_and_leaves_nothing_settled() -> None:
    def here() -> tuple[int, str]:
        return os.getpid(), Accelerator().mixed_precision

    assert launch(here, num_processes=1, mixed_precision="bf16") == [(os.getpid(), "bf16")]
    assert launch(here) == [(os.getpid(), "no")]  # no device: one process
    assert not is_initialized()
    with pytest.raises(ValueError, match="no data"):
        launch(no_data, num_processes=1)


def run_script(tmp_path: Path, text: str, *words: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, str(script), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    text = """
        import sys
        import torch
        from accel_callbacks import Accelerator, notebook_launcher

        def ranks():
            accel = Accelerator()
            return accel.gather(torch.tensor([accel.process_index])).tolist()

        node, port = sys.argv[1:]
        print(notebook_launcher(ranks, num_processes=2, num_nodes=2, node_rank=int(node),
                                use_port=port))
    """
    nodes = [run_script(tmp_path, text, str(node), port) for node in range(2)]
    for node in nodes:
        out, _ = node.communicate()
        assert out.strip().endswith("[[0, 1, 2, 3], [0, 1, 2, 3]]"), out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("pass", "[0, 'cuda']"),
        ("torch.cuda.is_available()", "already used in this process"),
        ("torch.zeros(1, device='cuda')", "already used in this process"),
    ],
)
def test_cuda(tmp_path: Path, first: str, expected: str) -> None:
    """A restart makes one process a fork too."""
    text = f"""
        import torch
        from accel_callbacks import Accelerator, notebook_launcher

        {first}

        def train():
            accel = Accelerator()
            return [accel.process_index, accel.device.type]

        try:
            print(notebook_launcher(train, num_processes=1, max_restarts=1)[0])
        except RuntimeError as error:
            print(error)
    """
    process = run_script(tmp_path, text)
    assert expected in process.communicate()[0]


def test_the_arguments_are_those_of_accelerate() -> None:
    assert list(inspect.signature(launch).parameters) == [
        *("function", "args", "num_processes", "mixed_precision", "use_port", "master_addr"),
        *("node_rank", "num_nodes", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "rdzv_id"),
        *("max_restarts", "monitor_interval", "log_line_prefix_template"),
    ]
    assert list(inspect.signature(debug_launcher).parameters) == [
        *("function", "args", "num_processes")
    ]
