"""State in memory under ZeRO: resumed by the ranks that left it, and by one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

from accel_callbacks import launch_memory
from accel_callbacks.addons.resilience.memory_snapshots import MemorySnapshots
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.launch.launch_folder import launch_folder
from accel_callbacks.launch_memory import VARIABLE
from tests.deepspeed.jobs import difference, finish, prepared, train, weights
from tests.support.rounding import ABSOLUTE

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm"),
]
STEPS = 12
_REMOVE = MemorySnapshots.forget


def trained(layout: str, folder: str, launch: str) -> tuple[int, Any]:
    """Train, and leave the snapshot of step 8; return the number of steps, and the weights."""
    os.environ[VARIABLE], launch_memory.ROOT = launch, Path(launch).parent
    MemorySnapshots.forget = _only_before  # type: ignore[method-assign]
    try:
        saver = Checkpoint(folder, every_n_epochs=10, memory_every_n_steps=8)
        job = prepared(layout, callbacks=[saver])
        steps = len(train(job))
        trained_weights = weights(job)
        finish(job[0])
        return steps, trained_weights
    finally:
        MemorySnapshots.forget = _REMOVE  # type: ignore[method-assign]
        del os.environ[VARIABLE]


def _only_before(self: MemorySnapshots, but: str | None = None) -> None:
    """Leave the newest snapshot, as a loss does, and not the end of a run."""
    if but is not None:
        _REMOVE(self, but)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(launch_memory, "ROOT", tmp_path)
    with launch_folder(tmp_path) as folder:
        yield str(folder)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_a_snapshot_of_two_ranks_is_resumed_by_two_and_by_one(
    pool: Any, alone: Any, tmp_path: Path, launch: str, layout: str
) -> None:
    saved = tmp_path / "saved"
    (steps, whole), _ = pool.run(trained, layout, str(saved), launch)
    assert steps == STEPS
    assert [path.name for path in Path(launch).glob("memory/*/*")] == ["snapshot-00000008"]
    shutil.rmtree(saved)  # as if all had been lost before the first checkpoint
    (steps, resumed), _ = pool.run(trained, layout, str(saved), launch)
    assert steps == STEPS - 8
    assert difference(resumed, whole) == 0.0
    shutil.rmtree(saved)
    ((steps, resumed),) = alone.run(trained, "ddp", str(saved), launch)
    assert steps == STEPS - 8
    assert difference(resumed, whole) < ABSOLUTE
