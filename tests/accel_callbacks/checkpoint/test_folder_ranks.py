"""All ranks take the same checkpoint of a folder, whoever finds the newest one damaged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks.checkpoint.open import open_folder, open_newest
from checkpoint_io import CheckpointFolder, CheckpointWarning, TorchGroup
from checkpoint_io.folder.folder import Fallback

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


def newest(path: str) -> int:
    reader = open_newest(open_folder(path))
    assert reader is not None
    return reader.state["step"]


def test_a_resume_takes_the_newest_that_opens_on_every_rank(pool: Any, tmp_path: Path) -> None:
    pool.run(fill, str(tmp_path))
    assert pool.run(newest, str(tmp_path)) == [2, 2]
    damaged = of_rank_1(tmp_path / "step-00000002", "objects")  # rank 0 does not read it
    data = bytearray(damaged.read_bytes())
    data[20] ^= 1
    damaged.write_bytes(bytes(data))
    assert pool.run(newest, str(tmp_path)) == [1, 1]


def unplugged_on_rank_1(path: str) -> None:
    group = TorchGroup()

    def attempt(found: str) -> str:
        if group.rank == 1:
            raise OSError("the cable is unplugged")
        return found

    Fallback(path, CheckpointFolder(path).survey, group).run(attempt)


def test_what_is_no_damage_is_raised_on_all_and_no_older_one_is_taken(
    pool: Any, tmp_path: Path
) -> None:
    pool.run(fill, str(tmp_path))
    first, second = pool.outcomes(unplugged_on_rank_1, str(tmp_path))
    assert first[0] == "CheckpointError"
    assert "step-00000002 failed" in first[1]
    assert second[0] == "OSError"
    assert all("the cable is unplugged" in text for _, text in (first, second))


def test_an_empty_folder_is_told_to_all(pool: Any, tmp_path: Path) -> None:
    for kind, text in pool.outcomes(take, str(tmp_path / "absent"), "open"):
        assert kind == "CheckpointNotFoundError", text
