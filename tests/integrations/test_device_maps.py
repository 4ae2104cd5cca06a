"""Device maps beside those of the real Accelerate, of random trees and of transformers' models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from accel_callbacks import utils
from tests.support.random_trees import WHOLE, accelerates, case, uses

pytest.importorskip("accelerate", reason="accelerate is not installed: scripts/test_adapters")
transformers = pytest.importorskip("transformers")

import accelerate.utils  # noqa: E402

MODELS = {
    "gpt2": ("AutoModelForCausalLM", "GPT2Config", {"n_layer": 6}),
    "llama": ("AutoModelForCausalLM", "LlamaConfig", {"num_hidden_layers": 8, "hidden_size": 256,
        "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 3000}),
    "t5": ("AutoModelForSeq2SeqLM", "T5Config", {"num_layers": 3}),
    "bert": ("AutoModelForMaskedLM", "BertConfig", {"num_hidden_layers": 4}),
    "vit": ("AutoModelForImageClassification", "ViTConfig", {"num_hidden_layers": 3}),
}  # fmt: skip


def empty(name: str) -> torch.nn.Module:
    auto, config, options = MODELS[name]
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(getattr(transformers, config)(**options))
    model.tie_weights()
    return model


def test_no_more_is_offloaded_than_by_accelerate() -> None:
    compared = 0
    for seed in range(1000, 1300):
        one = case(seed)
        theirs = accelerates(one)
        if theirs is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = utils.infer_auto_device_map(
                one.model, one.memory, [WHOLE], offload_buffers=one.offload_buffers
            )
        counted = uses(one, found)
        assert counted is not None
        assert counted[0] <= theirs, seed
        compared += 1
    assert compared > 80


@pytest.mark.parametrize("name", sorted(MODELS))
def test_sizes_and_balanced_budgets_are_those_of_accelerate(name: str) -> None:
    model = empty(name)
    whole = list(model._no_split_modules)
    sizes = utils.compute_module_sizes(model)
    assert dict(sizes) == dict(accelerate.utils.compute_module_sizes(model))
    assert utils.calculate_maximum_sizes(model) == accelerate.utils.calculate_maximum_sizes(model)
    ties = [sorted(group) for group in accelerate.utils.find_tied_parameters(model)]
    assert sorted(utils.find_tied_parameters(model)) == sorted(ties)
    told = accelerate.utils.check_tied_parameters_in_config(model)
    assert utils.check_tied_parameters_in_config(model) == bool(told)
    total = sizes[""]
    for memory in ({0: 2 * total, 1: total}, {0: total, 1: total, 2: total, "cpu": total}):
        for low in (False, True):
            budgets: list[Any] = [
                get(model, dict(memory), whole, low_zero=low)
                for get in (utils.get_balanced_memory, accelerate.utils.get_balanced_memory)
            ]
            if (
                name == "t5"
            ):  # its encoder's blocks are smaller than its decoder's: it takes the first
                assert all(budgets[0][device] >= nbytes for device, nbytes in budgets[1].items())
            else:
                assert budgets[0] == budgets[1]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_that_fits_one_device_has_one_entry(name: str) -> None:
    model = empty(name)
    whole = list(model._no_split_modules)
    total = utils.compute_module_sizes(model)[""]
    assert utils.infer_auto_device_map(model, {0: total}, whole) == {"": 0}
    accelerate.utils.check_device_map(
        model, utils.infer_auto_device_map(model, {0: total // 2, "cpu": total}, whole)
    )
