"""Tests with torch_xla, skipped without it: scripts/test_xla makes an environment that has it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

collect_ignore = (
    [] if importlib.util.find_spec("torch_xla") else ["test_training.py", "test_launch.py"]
)


@pytest.fixture(autouse=True)
def no_variables_of_launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins as a program does, with the XLA device of this process."""
    from accel_callbacks.distributed.topology import destroy_topology

    destroy_topology()
    for name in ("WORLD_SIZE", "RANK", "ACCEL_DISTRIBUTED_TYPE"):
        monkeypatch.delenv(name, raising=False)
    yield
    destroy_topology()
