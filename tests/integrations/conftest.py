"""These tests need the packages themselves: `scripts/test_adapters` has an environment for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_callbacks.distributed.topology import destroy_topology
from tests.distributed.conftest import Pool, make_pool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two processes that have imported Lightning, which may take longer than a test."""
    for made in make_pool(2, tmp_path_factory.mktemp("pool")):
        for connection in made.connections:
            connection.send((str(Path(__file__).with_name("test_two_processes.py")), "ready", ()))
        for connection in made.connections:
            assert connection.poll(110)
            assert connection.recv() == ("ok", None)
        yield made


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """No test begins with what another has settled."""
    destroy_topology()
    yield
    destroy_topology()
