"""S3 servers for the tests: real ones, on free ports of loopback, gone when the block ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.bound import BOUND
from tests.support.ports import free_port

KEY, SECRET, REGION, BUCKET = "test", "test-secret", "eu-west-1", "bucket"
_MOTO = "import sys; from moto.server import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class S3Server:
    """A running server with an empty bucket."""

    kind: str
    port: int
    bucket: str
    process: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """The storage options to give to fsspec, afresh on each call."""
        return {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": REGION},
        }

    def url(self, path: str) -> str:
        return f"s3://{self.bucket}/{path}"

    def client(self) -> Any:
        """A boto3 client, to look past what is under test."""
        boto3 = pytest.importorskip("boto3")
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )


def binary(name: str) -> str:
    """Find a program beside this interpreter or on the path; skip the test without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@contextmanager
def s3_server(kind: str, bucket: str = BUCKET) -> Iterator[S3Server]:
    """Run "moto", "seaweedfs" (strict) or "rclone" (ignores conditional writes)."""
    command = _COMMANDS[kind]
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
    port = free_port()
    log = (folder / "log").open("wb")
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(
            command(port, folder),
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "HOME": str(folder)},
        )
        server = S3Server(kind, port, bucket, process)
        _wait_for_bucket(server, folder / "log")
        yield server
    finally:
        if process is not None:
            _end(process)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def sftp_server() -> Iterator[tuple[str, dict[str, Any], int]]:
    """Run an SFTP server with an empty folder; gives URL, storage options and process id."""
    folder, port = Path(tempfile.mkdtemp(prefix="sftp-")), free_port()
    (folder / "data").mkdir()
    command = [
        binary("rclone"), "serve", "sftp", str(folder / "data"), "--addr", f"127.0.0.1:{port}",
        "--user", KEY, "--pass", SECRET,
    ]  # fmt: skip
    process: subprocess.Popen[bytes] | None = None
    try:
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
            )
        _wait_for_port(port, process, folder / "log")
        options = {"port": port, "username": KEY, "password": SECRET, "look_for_keys": False}
        yield "sftp://127.0.0.1", {**options, "allow_agent": False}, process.pid
    finally:
        if process is not None:
            _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _moto(port: int, folder: Path) -> list[str]:
    pytest.importorskip("moto.server")
    return [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)]


def _seaweedfs(port: int, folder: Path) -> list[str]:
    """One process that is master, volume server, filer and gateway; all its ports are free ones."""
    who = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "identities.json").write_text(json.dumps({"identities": [who]}), encoding="utf-8")
    (folder / "data").mkdir()
    parts = ("master.port", "volume.port", "filer.port", "master.port.grpc", "volume.port.grpc")
    ports = [f"-{part}={free_port()}" for part in (*parts, "filer.port.grpc", "s3.port.grpc")]
    return [
        binary("weed"), "-logtostderr", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.port={port}",
        f"-s3.config={folder / 'identities.json'}", "-volume.max=60",
        "-master.volumeSizeLimitMB=1024", "-master.telemetry=false", "-s3.port.lance=0",
        "-s3.port.iceberg=0", f"-s3.localSocket={folder / 's3.sock'}",
        f"-filer.localSocket={folder / 'filer.sock'}", *ports,
    ]  # fmt: skip


def _rclone(port: int, folder: Path) -> list[str]:
    (folder / "data").mkdir()
    address = f"127.0.0.1:{port}"
    keys = f"{KEY},{SECRET}"
    return [
        binary("rclone"), "serve", "s3", str(folder / "data"), "--addr", address,
        "--auth-key", keys,
    ]  # fmt: skip


_COMMANDS: dict[str, Callable[[int, Path], list[str]]] = {
    "moto": _moto,
    "seaweedfs": _seaweedfs,
    "rclone": _rclone,
}


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until somebody listens."""
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server died:\n{log.read_text(errors='replace')[-2000:]}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


def _wait_for_bucket(server: S3Server, log: Path) -> None:
    """Make the bucket and write into it; until that works the server is not up."""
    _wait_for_port(server.port, server.process, log)
    deadline = time.monotonic() + BOUND.total_seconds()
    client = server.client()
    made = False
    while True:
        try:
            if not made:
                client.create_bucket(
                    Bucket=server.bucket,
                    CreateBucketConfiguration={"LocationConstraint": REGION},
                )
                made = True
            client.put_object(Bucket=server.bucket, Key="up", Body=b"x")
            client.delete_object(Bucket=server.bucket, Key="up")
            return
        except Exception as error:
            made = made or type(error).__name__ == "BucketAlreadyOwnedByYou"
            if time.monotonic() > deadline or server.process.poll() is not None:
                raise
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the server and what it started: nothing it holds is worth an orderly end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
