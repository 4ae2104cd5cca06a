"""Comparisons of trainings whose sums are added in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

__all__ = ["ABSOLUTE", "assert_reordered", "reordered"]

# An addition in float32 is off by up to 6e-8 of its result. A layout (ranks, shards, cut layers)
# adds the same terms in another order, and each processor's vector units (AVX2, AVX-512, none) and
# number of threads in yet another one. Adam divides by values near zero, which makes the difference
# of a weight some hundred times larger. A mistake in a layout shows from 1e-3 on.
RELATIVE = 1e-5
ABSOLUTE = 1e-5


def reordered(expected: Any) -> Any:
    """Equal ``expected`` (numbers, a list or a dict of them) up to the rounding of float32."""
    return pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE)


def assert_reordered(result: Any, expected: Any, name: str = "") -> None:
    """Assert that nested dicts of numbers or lists are equal up to the rounding of float32."""
    if isinstance(expected, dict):
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            assert_reordered(result[key], value, f"{name} {key}")
    else:
        torch.testing.assert_close(
            torch.as_tensor(result), torch.as_tensor(expected), rtol=RELATIVE, atol=ABSOLUTE,
            msg=lambda text: f"{name}: {text}",
        )  # fmt: skip
