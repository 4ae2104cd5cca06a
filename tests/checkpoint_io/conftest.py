from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint_io.scripted_s3 import ScriptedS3, scripted_s3


@pytest.fixture
def state() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {
            "w": torch.randn(64, 33, generator=generator),
            "b": torch.randn(33, generator=generator),
        },
        "step": 7,
    }


@pytest.fixture
def flip_bit() -> Callable[[Path, int], None]:
    def flip(path: Path, at: int) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        path.write_bytes(bytes(data))

    return flip


@pytest.fixture(scope="module")
def scripts() -> Iterator[ScriptedS3]:
    """A server whose answers the tests of a module write."""
    with scripted_s3() as running:
        yield running
