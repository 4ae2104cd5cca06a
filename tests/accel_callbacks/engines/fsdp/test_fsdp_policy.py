"""The precision policy of sharded models: given, or that of the Accelerator's precision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from accel_callbacks import (
    AutocastKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Topology,
)
from accel_callbacks.engines import FSDP
from accel_callbacks.plugins import sort_handlers

BF16, FP32 = torch.bfloat16, torch.float32


def policy_of(precision: str, given: object = None, *handlers: object, world: int = 2) -> tuple:
    """Whether the strategy casts, and its policy."""
    topology = Topology(torch.device("cpu"), world_size=world)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=given)
    strategy = FSDP(topology, sort_handlers(handlers), None, plugin)
    return strategy.casts_to(precision), strategy._policy


@pytest.mark.parametrize(
    ("precision", "given", "casts", "expected"),
    [
        ("no", None, False, MixedPrecisionPolicy()),
        ("bf16", None, True, MixedPrecisionPolicy(BF16, FP32, FP32)),
        # Autocast, which keeps norms and sums in float32.
        ("fp16", None, False, MixedPrecisionPolicy()),
        ("fp16", "fp16", True, MixedPrecisionPolicy(torch.float16, FP32, FP32)),
        ("no", "bf16", True, MixedPrecisionPolicy(BF16, FP32, FP32)),
        ("bf16", "no", False, MixedPrecisionPolicy()),
        ("bf16", {"param_dtype": BF16}, True, MixedPrecisionPolicy(BF16)),
        ("bf16", {"param_dtype": "bf16"}, True, MixedPrecisionPolicy(BF16)),
        ("no", MixedPrecisionPolicy(BF16, BF16), True, MixedPrecisionPolicy(BF16, BF16)),
        (
            "no",
            SimpleNamespace(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
            True,
            MixedPrecisionPolicy(BF16, BF16),
        ),
        ("fp8", "bf16", False, MixedPrecisionPolicy(BF16, FP32, FP32)),
    ],
    ids=str,
)
def test_policy(precision, given, casts, expected):
    assert policy_of(precision, given) == (casts, expected)


def test_options_of_autocast_count():
    assert policy_of("bf16", None, AutocastKwargs(enabled=False)) == (False, MixedPrecisionPolicy())
    _, policy = policy_of("bf16", None, AutocastKwargs(upcast_outputs=False))
    assert policy == MixedPrecisionPolicy(BF16, FP32)


def test_one_rank_is_left_to_autocast():
    assert policy_of("bf16", world=1) == (False, None)


@pytest.mark.parametrize(("given", "error"), [("bf61", ValueError), (3, TypeError)])
def test_wrong_policies_are_errors(given, error):
    with pytest.raises(error, match="mixed_precision_policy"):
        policy_of("no", given)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("FULL_SHARD", (1, 8)), ("HYBRID_SHARD", (2, 4)), ("HYBRID_SHARD_ZERO2", (2, 4))],
)
def test_hybrid_strategies_replicate_over_machines(strategy, sizes):
    topology = Topology(torch.device("cpu"), world_size=8, local_world_size=4)
    plugin = FullyShardedDataParallelPlugin(sharding_strategy=strategy)
    parallelism = FSDP(topology, None, None, plugin).parallelism
    assert isinstance(parallelism, ParallelismConfig)
    assert (parallelism.dp_replicate_size, parallelism.dp_shard_size) == sizes
