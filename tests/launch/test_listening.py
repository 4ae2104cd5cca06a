"""At which addresses launches listen: on one machine at those of loopback alone."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from accel_callbacks.distributed.tcp_store import local_address_towards, serve_store
from tests.support import warm
from tests.support.bound import BOUND
from tests.support.listening import listening

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def _slow(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.slow)


LAUNCH = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--cpu"]
# Rank 0 says that all processes have met, and waits until it was looked at.
HELD = """
    def hold():
        dist.barrier()
        if dist.get_rank() == 0:
            print("met", flush=True)
            sys.stdin.readline()
        dist.barrier()
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and "--lose" in sys.argv:
            os._exit(3 if dist.get_rank() == 1 else 0)
"""
GROUPS = {
    "ours": "from accel_callbacks import Accelerator\n    Accelerator(cpu=True)",
    "own": "dist.init_process_group('gloo')",
}
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a script with the given words before it; killed at the end if it is still there."""
    started: list[subprocess.Popen[str]] = []

    def begin(before: list[str], script: str, *after: str, **extra: str) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        drop = ("ACCEL_", "TORCH", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "GLOO_", "NCCL_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        process = warm.Popen(
            [*before, "script.py", *after], cwd=tmp_path, env={**env, **extra}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            warm_children=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def addresses(process: subprocess.Popen[str], root: int | None = None) -> list[str]:
    """Return where the processes listen once all have met; they go on after it."""
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "met\n"
    found = listening(process.pid if root is None else root)
    process.stdin.write("\n")
    process.stdin.flush()
    return found


def script(group: str) -> str:
    return f"import os, sys\nimport torch.distributed as dist\n{textwrap.dedent(HELD)}\n" + (
        textwrap.dedent(f"    {GROUPS[group]}\n    hold()\n")
    )


@pytest.mark.parametrize("words", [[], _slow(["--rdzv_backend", "c10d"]), _slow(["--standalone"])])
def test_a_launch_listens_on_loopback(start: Start, words: list[str]) -> None:
    process = start([*LAUNCH, "--num_processes", "2", *words], script("ours"))
    found = addresses(process)
    assert len(found) >= 3  # the store, and gloo on each rank
    assert set(found) == {"127.0.0.1"}
    assert process.wait() == 0


@pytest.mark.parametrize("group", ["ours", _slow("own")])
def test_each_attempt_listens_on_loopback(start: Start, group: str) -> None:
    words = ["--num_processes", "2", "--max_restarts", "1"]
    process = start([*LAUNCH, *words], script(group), "--lose")
    first, again = addresses(process), addresses(process)
    assert process.wait() == 0
    assert set(first) == set(again) == {"127.0.0.1"}
    # The store of the first attempt is gone: the rendezvous, a store, and gloo on each rank.
    assert len(first) == len(again) >= 4


def test_one_process_does_not_listen(start: Start) -> None:
    text = "import sys\nfrom accel_callbacks import Accelerator\nAccelerator(cpu=True)\n"
    process = start(LAUNCH, text + "print('met', flush=True)\nsys.stdin.readline()\n")
    assert addresses(process) == []
    assert process.wait() == 0


@pytest.mark.parametrize(
    "options", [_slow(""), ", use_port=0, max_restarts=1", _slow(", use_port={port}")]
)
def test_a_notebook_listens_on_loopback(start: Start, free_port: int, options: str) -> None:
    # The forks of a notebook have no standard input: a pipe of the launcher holds them.
    text = f"""
        import os, sys
        from accel_callbacks import Accelerator, notebook_launcher

        asked, told = os.pipe()

        def train():
            accel = Accelerator(cpu=True)
            accel.wait_for_everyone()
            if accel.is_main_process:
                print("met", flush=True)
                os.read(asked, 1)
            accel.wait_for_everyone()

        if os.fork() == 0:
            sys.stdin.readline()
            os.write(told, b"x")
            os._exit(0)
        notebook_launcher(train, num_processes=2{options.format(port=free_port)})
    """
    process = start([sys.executable], text, ACCEL_CPU="1")
    found = addresses(process)
    assert len(found) >= 3
    assert set(found) == {"127.0.0.1"}
    assert process.wait() == 0


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("method", [_slow("env://"), "tcp://127.0.0.1:{port}"])
def test_a_group_without_launcher_listens_where_it_meets(
    start: Start, free_port: int, method: str
) -> None:
    url = method.format(port=free_port)
    text = script("ours").replace("cpu=True", f"cpu=True, kwargs_handlers=[group({url!r})]")
    text = "from accel_callbacks import InitProcessGroupKwargs\n" + text
    text = text.replace("group(", "InitProcessGroupKwargs(init_method=")
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port), "WORLD_SIZE": "2"}
    place["GLOO_SOCKET_IFNAME"] = "lo"  # gloo's own listeners are where it is told
    first, second = (start([sys.executable], text, RANK=str(one), **place) for one in range(2))
    assert set(addresses(first)) == {"127.0.0.1"}
    assert first.wait() == second.wait() == 0


# --- the store ---------------------------------------------------------------------------------


@pytest.fixture
def where() -> Callable[[], list[str]]:
    """Return where this process listens by now, besides what other tests have left open."""
    gc.collect()
    before = Counter(listening(os.getpid()))
    return lambda: sorted((Counter(listening(os.getpid())) - before).elements())


@pytest.mark.parametrize("libuv", ["0", "1"])
def test_a_second_store_of_the_port_shares_the_server(
    monkeypatch: pytest.MonkeyPatch, where: Callable[[], list[str]], libuv: str
) -> None:
    monkeypatch.setenv("USE_LIBUV", libuv)
    store = serve_store("localhost", 0, one_machine=True)
    assert store is not None
    assert where() == ["127.0.0.1"]
    second = dist.TCPStore(
        "127.0.0.1", store.port, is_master=True, multi_tenant=True, timeout=BOUND
    )
    assert where() == ["127.0.0.1"]
    second.set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert second.get("key") == b"value"
    del second
    assert where() == []


def test_a_name_that_only_this_machine_takes_for_loopback_is_not_served_to_others(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: Callable[[], list[str]],
) -> None:
    # What Debian writes into /etc/hosts for a machine's own name.
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert serve_store("node0", 0, one_machine=False) is None
    assert "listens on all interfaces, as node0 is no address of this machine" in (
        capsys.readouterr().err
    )
    store = serve_store("node0", 0, one_machine=True)
    assert store is not None
    assert where() == ["127.0.1.1"]


def test_an_address_of_another_machine_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_store("192.0.2.77", 29500, one_machine=False, announces=False) is None
    assert capsys.readouterr().err == ""
    assert serve_store("192.0.2.77", 29500, one_machine=False) is None
    assert "at port 29500 listens on all interfaces" in capsys.readouterr().err


def test_a_taken_port_is_left_to_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve_store("127.0.0.1", port, one_machine=True) is None
    assert capsys.readouterr().err == ""


def test_the_address_towards_a_host_is_of_this_machine() -> None:
    assert local_address_towards("localhost", 0) == "127.0.0.1"
    assert local_address_towards("no.such.host.invalid", 1) is None
