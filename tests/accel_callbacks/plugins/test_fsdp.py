"""Options of FSDP: what they mean in FSDP2, and which of them mean nothing."""

from __future__ import annotations

import warnings
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin

Plugin = FullyShardedDataParallelPlugin


class ShardingStrategy(Enum):
    """As torch's FSDP1 has it."""

    SHARD_GRAD_OP = 2


@pytest.mark.parametrize(
    ("options", "reshard", "hybrid"),
    [
        ({}, True, False),
        ({"reshard_after_forward": False}, False, False),
        ({"reshard_after_forward": 2}, 2, False),
        ({"reshard_after_forward": "false"}, False, False),
        ({"reshard_after_forward": "4"}, 4, False),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, False, False),
        ({"sharding_strategy": "FULL_SHARD"}, True, False),
        ({"sharding_strategy": 2}, False, False),
        ({"sharding_strategy": "5"}, False, True),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, False, False),
        ({"sharding_strategy": "hybrid_shard"}, True, True),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, False, True),
        ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, True, False),
    ],
)
def test_strategies_of_fsdp1_say_when_to_reshard(options, reshard, hybrid):
    plugin = Plugin(**options)
    assert plugin.reshard is reshard or (plugin.reshard == reshard and reshard not in (0, 1))
    assert plugin.is_hybrid is hybrid


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"sharding_strategy": "NO_SHARD"}, ValueError, "DistributedDataParallel"),
        ({"sharding_strategy": "FULL_SHRAD"}, ValueError, "Did you mean 'FULL_SHARD'"),
        ({"sharding_strategy": 0}, ValueError, "sharding_strategy=0 is unknown"),
        ({"fsdp_version": 3}, ValueError, "fsdp_version=3 must be 2"),
        ({"reshard_after_forward": "maybe"}, ValueError, "a number of ranks"),
        ({"backward_prefetch": "PRE"}, ValueError, "backward_prefetch='PRE' is unknown"),
        ({"auto_wrap_policy": "SIZE"}, ValueError, "SIZE_BASED_WRAP"),
        ({"auto_wrap_policy": 3}, TypeError, "a function of a module"),
        ({"use_orig_params": 1}, TypeError, "use_orig_params=1 must be True or False"),
        ({"min_num_params": "many"}, TypeError, "must be an integer"),
        ({"min_num_params": -1}, ValueError, "at least 0"),
        ({"cpu_ofload": True}, TypeError, "Did you mean 'cpu_offload'"),
    ],
)
def test_wrong_options_are_errors(options, error, text):
    with pytest.raises(error, match=text):
        Plugin(**options)


def test_options_without_a_meaning_are_named_one_by_one():
    plugin = Plugin(
        fsdp_version=1,
        backward_prefetch="BACKWARD_POST",
        use_orig_params=False,
        limit_all_gathers=False,
        state_dict_type="FULL_STATE_DICT",
    )
    version, idle = plugin.notes()
    assert version == "fsdp_version=1 is trained as FSDP2."
    for name in ("backward_prefetch", "use_orig_params", "limit_all_gathers", "state_dict_type"):
        assert f"{name}=" in idle


def test_what_fsdp2_does_anyway_is_no_note():
    usual = Plugin(
        fsdp_version=2,
        backward_prefetch="BACKWARD_PRE",
        use_orig_params=True,
        limit_all_gathers=True,
        state_dict_type="SHARDED_STATE_DICT",
        sync_module_states=True,
    )
    assert usual.notes() == []


def test_the_notes_are_warned_of_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accel = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=1, use_orig_params=False))
        accel.prepare(torch.nn.Linear(1, 1))
    texts = [str(one.message) for one in caught if "FSDP2" in str(one.message)]
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("given", "offloads"),
    [
        (None, False),
        (True, True),
        (SimpleNamespace(offload_params=True), True),
        (SimpleNamespace(offload_params=False), False),
        (type("CPUOffloadPolicy", (), {})(), True),
        (type("OffloadPolicy", (), {})(), False),
    ],
)
def test_offloading_is_read_from_both_versions(given, offloads):
    assert Plugin(cpu_offload=given).offloads is offloads


def test_names_of_classes_are_a_list_or_a_text():
    for given in ("Block, Head", ["Block", "Head"]):
        names = Plugin(transformer_cls_names_to_wrap=given).transformer_cls_names_to_wrap
        assert names == ("Block", "Head")
