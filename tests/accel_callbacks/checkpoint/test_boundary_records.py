"""BoundaryRecords: what a rank has left is read whole, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks.checkpoint.boundary_records import BoundaryRecords, RecordTooLargeError

TREE = {"rng": b"\x00\n\xff", "metrics": [1.5, float("inf"), None], "pair": (1, "a")}


def records(folder: Path, attempt: str = "one", largest: int = 1000) -> BoundaryRecords:
    return BoundaryRecords(str(folder), attempt, largest)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor([True, False]),
    ],
)
def test_a_tree_comes_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    records(tmp_path).write(1, 7, {**TREE, "tensors": [torch.ones(3), tensor]})
    tree = records(tmp_path).read(1, 7)
    first, second = tree.pop("tensors")
    assert tree == TREE
    assert torch.equal(first, torch.ones(3))
    assert second.dtype == tensor.dtype
    assert torch.equal(second, tensor)


def test_the_last_two_steps_of_this_attempt_are_there(tmp_path: Path) -> None:
    written = records(tmp_path)
    for step in range(5):
        written.write(0, step, {"step": step})
    found = [records(tmp_path).read(0, step) for step in range(5)]
    assert found == [None, None, None, {"step": 3}, {"step": 4}]
    assert records(tmp_path).read(1, 4) is None
    assert records(tmp_path, "another").read(0, 4) is None


def test_one_that_is_cut_short_or_damaged_does_not_count(tmp_path: Path) -> None:
    records(tmp_path).write(0, 1, {"weights": torch.ones(8)})
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damage in (whole[:-1], whole[:5], b"", whole[:-1] + b"\x00"):
        file.write_bytes(damage)
        assert records(tmp_path).read(0, 1) is None
    file.write_bytes(whole)
    assert records(tmp_path).read(0, 1) is not None


@pytest.mark.parametrize("value", [torch.ones(300), "x" * 1200])
def test_one_that_is_too_large_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(RecordTooLargeError):
        records(tmp_path).write(0, 1, {"value": value})
    assert list(tmp_path.iterdir()) == []
