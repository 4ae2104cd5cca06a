"""States in which every tensor knows the step, so that a mixture of two saves cannot pass."""

from __future__ import annotations

from typing import Any

import torch

NUMEL = 300_000  # of the largest tensor: 1.2 MB; another has a quarter of that


def state_of(step: int, numel: int = NUMEL, job: int = 0) -> dict[str, Any]:
    """Build the state of a step (of a job): positions and steps can be read from the values."""
    mark = step * 8 + job
    weight = torch.arange(numel, dtype=torch.int32) + mark
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "bias": torch.arange(33, dtype=torch.float64) - mark,
            "half": torch.full((17, 5), float(mark % 200)).bfloat16(),
            "none": torch.empty(0, 3),
        },
        "optimizer": {
            0: {"exp_avg": torch.full((numel // 8, 2), float(mark)), "step": torch.tensor(mark)}
        },
        "step": step,
        "job": job,
    }


def local_of(step: int, rank: int, job: int = 0) -> dict[str, Any]:
    """Build a rank's own state of a step."""
    mark = step * 8 + job
    return {"rng": torch.arange(64) * (rank + 1) + mark, "step": step, "rank": rank}


def step_of(state: Any) -> tuple[int, int]:
    """Return (step, job) of a state that is bitwise whole; AssertionError for a mixture."""
    step, job = state["step"], state["job"]
    numel = state["model"]["weight"].numel()
    assert_same(state, state_of(step, numel, job))
    return step, job


def whole(checkpoint: Any, rank: int = 0) -> tuple[int, int]:
    """Return (step, job) of a loaded checkpoint whose shared and own states are of one save."""
    step, job = step_of(checkpoint.state)
    if checkpoint.local_state is not None:
        assert_same(checkpoint.local_state, local_of(step, rank, job))
    return step, job


def assert_same(found: Any, expected: Any, path: str = "state") -> None:
    """Compare two trees bitwise, dtypes and shapes included."""
    assert type(found) is type(expected), f"{path}: {type(found)} is not {type(expected)}"
    if isinstance(expected, dict):
        assert list(found) == list(expected), f"{path}: other keys {list(found)}"
        for key in expected:
            assert_same(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, torch.Tensor):
        same = found.dtype == expected.dtype and found.shape == expected.shape
        assert same, f"{path}: {found.dtype} {found.shape}"
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected))
        assert torch.equal(left, right), f"{path} is not the tensor that was saved"
    else:
        assert found == expected, f"{path}: {found!r} is not {expected!r}"
