"""KeptTensors: whatever is written to a tensor is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accel_callbacks.addons.resilience.kept_tensors import KeptTensors


def assign(weight: torch.Tensor) -> None:
    weight.data = torch.zeros_like(weight)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda weight: weight.add_(1),
    "a part": lambda weight: weight[-1:].add_(1),
    "foreach": lambda weight: torch._foreach_add_([weight], 1),
    "data": lambda weight: weight.data.add_(1),
    "assigned": assign,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@torch.no_grad()
def test_a_write_is_noticed(write: Callable[[torch.Tensor], object]) -> None:
    weight, other, kept = torch.ones(40, 3), torch.ones(2), KeptTensors()
    kept.keep([weight, other], [weight])
    assert kept.unchanged()
    write(weight)
    assert not kept.unchanged()
    kept.keep([weight, other], [weight])
    assert kept.unchanged()


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.ones(8, 8).t(),
        torch.ones(8, 8)[:, ::2],
        torch.ones(()),
        torch.ones(0),
        torch.ones(4, dtype=torch.bfloat16),
    ],
    ids=["channels last", "transposed", "with gaps", "a number", "empty", "bfloat16"],
)
def test_values_are_compared_in_any_layout(weight: torch.Tensor) -> None:
    kept = KeptTensors()
    for _ in range(2):  # views are made once
        kept.keep([], [weight])
        assert kept.unchanged()
    weight.data.add_(1)
    assert kept.unchanged() == (weight.numel() == 0)


def test_a_state_that_is_written_to_is_noticed() -> None:
    weight, average, kept = torch.ones(2), torch.ones(2), KeptTensors()
    kept.keep([weight, average], [weight])
    average.mul_(2)
    assert not kept.unchanged()
