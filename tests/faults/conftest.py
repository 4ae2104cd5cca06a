"""What the fault tests share: a fork server for victims, S3 servers, and the way to the kit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:  # victims are named by module, here and in the fork server
    sys.path.insert(0, HERE)

from faultkit.forking import ForkServer  # noqa: E402

from tests.servers import S3Server, s3_server  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compare tensors on one thread: the victims need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Starts processes that may be killed, a few milliseconds each."""
    with ForkServer(tmp_path_factory.mktemp("victims")) as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """A forgiving S3 server that starts fast."""
    with s3_server("moto") as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[S3Server]:
    """A strict S3 server, which nobody wrote for tests."""
    with s3_server("seaweedfs") as server:
        yield server


@pytest.fixture(params=["moto", pytest.param("seaweedfs", marks=pytest.mark.slow)])
def s3(request: pytest.FixtureRequest) -> S3Server:
    """Each server in turn, the second one in the long run only."""
    server: S3Server = request.getfixturevalue(request.param)
    return server
