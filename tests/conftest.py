"""Fixtures for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from tests.support.pool import Pool, make_pool

ROOT = Path(__file__).parent.parent


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """SIGTERM as it is in a script, where neither the session nor another test listens."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def s3_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """The storage options of an S3 server on loopback, with a bucket named ``bucket``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
    script = "import sys; from moto.server import main; sys.exit(main(sys.argv[1:]))"
    server = subprocess.Popen(
        [sys.executable, "-c", script, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
    )
    try:
        _wait_for(port, server)
        options: dict[str, object] = {
            "key": "test",
            "secret": "test",
            "endpoint_url": f"http://127.0.0.1:{port}",
            "client_kwargs": {"region_name": "eu-west-1"},
        }
        fsspec.filesystem("s3", **options).mkdir("bucket")
        yield options
    finally:
        server.terminate()
        server.wait()
        log.close()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    while True:
        assert server.poll() is None, "moto_server died"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)


@pytest.fixture(params=["win32", "darwin"])
def on_other_system(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """Run Python in an empty folder of another system; return what it printed."""
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(ROOT / "tests" / "support" / "other_system.py", site / "sitecustomize.py")
    (tmp_path / "work").mkdir()
    drop = ("ACCEL_", "TORCH", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "GLOO_", "USE_LIBUV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "ACCEL_OTHER_SYSTEM": request.param,
        **dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME"), str(tmp_path / "home")),
        "OMP_NUM_THREADS": "1",
    }

    def start(*words: str, code: int = 0, script: str | None = None) -> str:
        if script is not None:
            (tmp_path / "work" / "script.py").write_text(textwrap.dedent(script), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path / "work", env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    return start


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One process, for what would otherwise start many, each with the imports anew."""
    yield from make_pool(1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two processes."""
    yield from make_pool(2, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def pool_of_4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four processes."""
    yield from make_pool(4, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def pool_of_8(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Eight processes, for slow tests of three axes."""
    yield from make_pool(8, tmp_path_factory.mktemp("pool"))


@pytest.fixture
def fresh_pool(tmp_path: Path) -> Iterator[Pool]:
    """Two processes for a test that breaks their group."""
    fresh = Pool(2, tmp_path)
    yield fresh
    fresh.kill()
