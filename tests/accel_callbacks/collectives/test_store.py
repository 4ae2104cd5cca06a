"""A store whose calls come back, also where nobody answers."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from accel_callbacks.collectives.store import BoundedStore


def test_a_store_that_is_closed_answers_at_once() -> None:
    held = BoundedStore(dist.HashStore())
    held.set("key", "1")
    held.close()
    with pytest.raises(dist.DistNetworkError, match="does not answer"):
        held.get("key")
