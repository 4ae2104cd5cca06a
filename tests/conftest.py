"""Fixtures for all tests."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import fsspec
import pytest


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
        server.wait(10)
        log.close()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "moto_server died"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("moto_server did not start")
