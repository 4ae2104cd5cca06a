"""All ranks take the same checkpoint of a folder, whoever finds the newest one damaged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import CheckpointFolder, CheckpointWarning, TorchGroup

pytestmark = pytest.mark.distributed


def fill(path: str) -> None:
    from accel_callbacks import Accelerator

    Accelerator(cpu=True)
    group = TorchGroup()
    folder = CheckpointFolder(path)
    for step in (1, 2):
        state = {"model": {"w": torch.full((5,), float(step))}, "step": step}
        local = {"own": torch.full((9,), float(step)), "rank": group.rank}
        folder.save(step, state, local_state=local, metadata={"run_id": "r"}, group=group)


def take(path: str, how: str) -> list[Any]:
    group = TorchGroup()
    folder, weight = CheckpointFolder(path), torch.zeros(5)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CheckpointWarning)
        if how == "open":
            reader = folder.open_latest(group=group)
            state, own = reader.state, reader.local_state
            assert own is not None
            weight = state["model"]["w"].read()
        else:
            into = {"model": {"w": weight}} if how == "into" else None
            found = folder.load_latest(group=group, into=into)
            state, own = found.state, found.local_state
            assert own is not None
            weight = weight if into else state["model"]["w"]
    said = [str(warning.message) for warning in told if "passed over" in str(warning.message)]
    return [state["step"], weight.tolist(), own["rank"], bool(said)]


def of_rank_1(folder: Path, kind: str) -> Path:
    return next(folder.glob(f"{kind}-*-r00001*"))


@pytest.mark.parametrize("how", ["load", "into", "open"])
def test_damage_that_one_rank_finds_makes_all_fall_back(
    pool: Any, tmp_path: Path, how: str
) -> None:
    pool.run(fill, str(tmp_path))
    assert pool.run(take, str(tmp_path), how) == [[2, [2.0] * 5, rank, False] for rank in (0, 1)]
    damaged = of_rank_1(tmp_path / "step-00000002", "objects")  # rank 0 has no need of it
    data = bytearray(damaged.read_bytes())
    data[20] ^= 1
    damaged.write_bytes(bytes(data))
    assert pool.run(take, str(tmp_path), how) == [[1, [1.0] * 5, rank, True] for rank in (0, 1)]
    damaged = of_rank_1(tmp_path / "step-00000001", "objects")
    damaged.write_bytes(bytes(len(damaged.read_bytes())))
    outcomes = pool.outcomes(take, str(tmp_path), how)
    # rank 0, which found nothing, has not written into its tensors either
    assert {kind for kind, _ in outcomes} == {"CorruptCheckpointError"}


def test_an_empty_folder_is_told_to_all(pool: Any, tmp_path: Path) -> None:
    for kind, text in pool.outcomes(take, str(tmp_path / "absent"), "open"):
        assert kind == "CheckpointNotFoundError", text
