"""Variables that Accelerate's launcher sets: not read, and never ignored in silence."""

from __future__ import annotations

import warnings

import pytest

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

#: As Accelerate's launcher sets them for a plain run: they ask for nothing.
PLAIN = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_DEBUG_MODE": "false",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",  # which transformers reads
}


def told(monkeypatch, variables, **options):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Accelerator(cpu=True, **options)
    texts = [str(one.message) for one in caught]
    return [text for text in texts if "not read here" in text]


def test_a_plain_run_says_nothing(monkeypatch):
    assert told(monkeypatch, PLAIN) == []


@pytest.mark.parametrize("value", ["true", "1", "True"])
def test_a_run_that_is_not_sharded_as_asked_says_so(monkeypatch, value):
    (text,) = told(monkeypatch, {**PLAIN, "ACCELERATE_USE_FSDP": value})
    assert f"ACCELERATE_USE_FSDP={value} is Accelerate's" in text
    assert "models are not sharded" in text
    assert "accel launch" in text


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_DEBUG_MODE", "1"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_MEGATRON_LM", "true"),
        ("MEGATRON_LM_TP_DEGREE", "2"),
        ("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", "True"),
        ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2"),
        ("FSDP_OFFLOAD_PARAMS", "true"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block"),
    ],
)
def test_each_variable_that_asks_for_something_is_named(monkeypatch, variable, value):
    (text,) = told(monkeypatch, {variable: value})
    assert text.startswith(f"{variable}={value} is ")
    assert "not sharded" not in text


def test_what_the_script_or_the_launch_sets_is_not_named(monkeypatch):
    variables = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCEL_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    options = {
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "parallelism_config": ParallelismConfig(dp_shard_size=1),
        "fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=False),
    }
    assert told(monkeypatch, variables, **options) == []
    (text,) = told(monkeypatch, {"FSDP_MIN_NUM_PARAMS": "100"}, **options)
    assert text.startswith("FSDP_MIN_NUM_PARAMS=100 is ")


def test_many_are_shortened(monkeypatch):
    axes = ("DP_REPLICATE", "DP_SHARD", "CP", "SP", "TP")
    (text,) = told(monkeypatch, {f"PARALLELISM_CONFIG_{axis}_SIZE": "2" for axis in axes})
    assert " and 1 more are Accelerate's" in text
