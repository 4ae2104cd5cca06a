"""These tests need DeepSpeed itself: `scripts/test_deepspeed` has an environment for it."""

from __future__ import annotations

from tests.distributed.conftest import alone, pool, pool_of_4

__all__ = ["alone", "pool", "pool_of_4"]
