"""State in memory of two ranks, which any number of ranks resumes from."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, DataLoaderConfiguration, launch_notes, set_seed
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.checkpoint.memory_snapshots import MemorySnapshots
from accel_callbacks.launch_notes import VARIABLE, launch_folder

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm"),
]


def train(folder: str, launch: str) -> tuple[int, list[float]]:
    """Train ten steps, and leave the snapshot of the eighth; return the first step, and weights."""
    os.environ[VARIABLE], launch_notes.MEMORY = launch, Path(launch).parent
    MemorySnapshots.remove = _only_before  # type: ignore[method-assign]
    try:
        saver = Checkpoint(folder, every_n_epochs=10, memory_every_n_steps=4)
        split = DataLoaderConfiguration(split_batches=True)
        accel = Accelerator(cpu=True, callbacks=[saver], dataloader_config=split)
        set_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=8, shuffle=True)
        model, optimizer, data = accel.prepare(model, optimizer, data)
        with accel.run("demo") as run:
            began = run.global_step
            for _ in run.epochs(1):
                for batch in data:
                    accel.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
        accel.end_training()
        return began, weights
    finally:
        MemorySnapshots.remove = _REMOVE  # type: ignore[method-assign]
        del os.environ[VARIABLE]


_REMOVE = MemorySnapshots.remove


def _only_before(self: MemorySnapshots, but: str | None = None) -> None:
    """Leave the newest snapshot, as a loss does, and not the end of a run."""
    if but is not None:
        _REMOVE(self, but)


def test_a_snapshot_of_two_ranks_is_resumed_by_one(
    pool: Any, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_notes, "MEMORY", tmp_path)
    with launch_folder(in_memory=True) as launch:
        (first, weights), _ = pool.run(train, str(tmp_path / "saved"), str(launch))
        (snapshot,) = launch.glob("memory/*/*")
        assert snapshot.name == "snapshot-00000008"
        shutil.rmtree(tmp_path / "saved")  # as if it had been lost before the first checkpoint
        ((began, resumed),) = alone.run(train, str(tmp_path / "saved"), str(launch))
    assert (first, began) == (0, 8)
    assert resumed == pytest.approx(weights, rel=1e-4)
