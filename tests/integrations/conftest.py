"""These tests need the packages themselves: `scripts/test_adapters` has an environment for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_callbacks.distributed.topology import destroy_topology


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """No test begins with what another has settled."""
    destroy_topology()
    yield
    destroy_topology()
