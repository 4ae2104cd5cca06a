"""State in memory of two ranks, which any number of ranks resumes from."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    launch_memory,
    set_seed,
)
from accel_callbacks.addons.resilience.memory_snapshots import MemorySnapshots
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.checkpoint.async_save import SaveGroup
from accel_callbacks.launch.launch_folder import launch_folder
from accel_callbacks.launch_memory import VARIABLE

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm"),
]


def train(folder: str, launches: list[str], **options: Any) -> tuple[int, list[float]]:
    """Train ten steps, and leave the snapshot of the eighth; return the first step, and weights.

    Args:
        folder: of checkpoints.
        launches: the folder of the launch for each rank: another one is another machine.
        **options: ``fsdp``; ``flip``, the rank that sends wrong bytes at the eighth step; ``keep``,
            the one that has the same callback in each call.
    """
    launch = launches[int(os.environ["RANK"])]
    os.environ[VARIABLE], launch_memory.ROOT = launch, Path(launch).parent
    MemorySnapshots.forget = _only_before  # type: ignore[method-assign]
    try:
        saver = Checkpoint(folder, every_n_epochs=10, memory_every_n_steps=4)
        if options.get("keep") == int(os.environ["RANK"]):
            saver = _kept.setdefault(folder, saver)
        split = DataLoaderConfiguration(split_batches=True)
        shards = FullyShardedDataParallelPlugin(fsdp_version=2) if options.get("fsdp") else None
        accel = Accelerator(
            cpu=True, callbacks=[saver], dataloader_config=split, fsdp_plugin=shards
        )
        set_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader(torch.randn(80, 8), batch_size=8, shuffle=True)
        model, optimizer, data = accel.prepare(model, optimizer, data)
        with accel.run("demo") as run:
            began = run.global_step
            for _ in run.epochs(1):
                for batch in data:
                    accel.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    if run.global_step == 8 and options.get("flip") == run.global_rank:
                        accel.wait_for_save()
                        SaveGroup.send = _send_wrong  # type: ignore[method-assign]
                    elif run.global_step == 8:
                        accel.wait_for_save()
        weights = torch.cat([w.flatten() for w in accel.get_state_dict(model).values()] or [_NONE])
        accel.end_training()
        return began, weights.tolist()
    finally:
        MemorySnapshots.forget, SaveGroup.send = _REMOVE, _SEND  # type: ignore[method-assign]
        del os.environ[VARIABLE]


_NONE = torch.empty(0)
_kept: dict[str, Checkpoint] = {}
_REMOVE, _SEND = MemorySnapshots.forget, SaveGroup.send


def _only_before(self: MemorySnapshots, but: str | None = None) -> None:
    """Leave the newest snapshot, as a loss does, and not the end of a run."""
    if but is not None:
        _REMOVE(self, but)


def _send_wrong(self: SaveGroup, tensor: torch.Tensor, rank: int) -> None:
    tensor[-1] ^= 1
    _SEND(self, tensor, rank)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[str]]:
    """The folders of the launch on four machines."""
    with ExitStack() as stack:
        folders = [stack.enter_context(launch_folder(tmp_path)) for _ in range(4)]
        yield list(map(str, folders))


def held(machine: str) -> dict[str, set[str]]:
    """Return the files of the snapshots on a machine, by the step."""
    folders = Path(machine).glob("memory/*/*")
    return {folder.name[-1]: set(os.listdir(folder)) for folder in folders}


def lose(machine: str, saved: Path) -> None:
    """Lose a machine before the first checkpoint."""
    shutil.rmtree(Path(machine, "memory"))
    shutil.rmtree(saved)


@pytest.mark.first
def test_a_snapshot_of_two_ranks_is_resumed_by_one(
    pool: Any, alone: Any, tmp_path: Path, machines: list[str]
) -> None:
    one = machines[:1] * 2
    (first, weights), _ = pool.run(train, str(tmp_path / "saved"), one)
    assert list(held(one[0])) == ["8"]
    shutil.rmtree(tmp_path / "saved")  # as if it had been lost before the first checkpoint
    ((began, resumed),) = alone.run(train, str(tmp_path / "saved"), one)
    assert (first, began) == (0, 8)
    assert resumed == pytest.approx(weights, rel=1e-4)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_lost_gets_its_part_from_the_other(
    pool: Any, tmp_path: Path, machines: list[str], lost: int
) -> None:
    (first, weights), _ = pool.run(train, str(tmp_path / "saved"), machines)
    assert list(held(machines[0])) == ["8"]
    assert held(machines[0]) == held(machines[1])
    lose(machines[lost], tmp_path / "saved")
    (began, resumed), _ = pool.run(train, str(tmp_path / "saved"), machines)
    assert (first, began) == (0, 8)
    assert resumed == weights


@pytest.mark.first
@pytest.mark.parametrize("lost", [0, 2])
def test_each_machine_holds_its_part_and_that_of_one_other(
    pool_of_4: Any, tmp_path: Path, machines: list[str], lost: int
) -> None:
    results = pool_of_4.run(_train_sharded, str(tmp_path / "saved"), machines)
    weights = results[0][1]
    copies = Counter(file for machine in machines for file in held(machine)["8"])
    assert copies.pop("manifest.json") == 4
    assert set(copies.values()) == {2}
    lose(machines[lost], tmp_path / "saved")
    results = pool_of_4.run(_train_sharded, str(tmp_path / "saved"), machines)
    assert [began for began, _ in results] == [8] * 4
    assert results[0][1] == weights


def _train_sharded(folder: str, machines: list[str]) -> tuple[int, list[float]]:
    return train(folder, machines, fsdp=True)


def _train_kept(folder: str, machines: list[str]) -> tuple[int, list[float]]:
    return train(folder, machines, keep=0)


def test_a_rank_that_survives_with_its_callback_agrees_with_a_new_one(
    pool: Any, tmp_path: Path, machines: list[str]
) -> None:
    pool.run(_train_kept, str(tmp_path / "saved"), machines[:1] * 2)
    shutil.rmtree(tmp_path / "saved")
    (began, _), _ = pool.run(_train_kept, str(tmp_path / "saved"), machines[:1] * 2)
    assert began == 8


def _train_flipped(folder: str, machines: list[str]) -> tuple[int, list[float]]:
    return train(folder, machines, flip=1)


def test_a_copy_that_arrives_damaged_does_not_count(
    pool: Any, tmp_path: Path, machines: list[str]
) -> None:
    pool.run(_train_flipped, str(tmp_path / "saved"), machines)
    assert [list(held(machine)) for machine in machines[:2]] == [["4"], ["4"]]
    lose(machines[1], tmp_path / "saved")
    (began, _), _ = pool.run(train, str(tmp_path / "saved"), machines)
    assert began == 4
