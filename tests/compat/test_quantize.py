"""Models of 8 and 4 bits. What computes needs bitsandbytes, which runs on a CPU."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from accel_callbacks import init_empty_weights
from accel_callbacks.compat import quantize
from accel_callbacks.compat.hooks import attach_align_device_hook, remove_hook_from_submodules
from accel_callbacks.compat.quantize import (
    BnbQuantizationConfig,
    get_keys_to_not_convert,
    has_4bit_bnb_layers,
    load_and_quantize_model,
)
from accel_callbacks.offload.placeholder import is_absent
from checkpoint_io import CheckpointError, save_model

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
TOKENS = torch.arange(5)[None]
CONFIGS = {
    "int8": {"load_in_8bit": True, "torch_dtype": "fp32"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"},
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    },
}
CLASSES = {"int8": "Linear8bitLt", "fp4": "Linear4bit", "nf4": "Linear4bit"}


class Language(torch.nn.Module):
    """A tied head, and linear layers between."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 64)
        self.block = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)
        )
        self.norm = torch.nn.LayerNorm(64)
        self.head = torch.nn.Linear(64, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.block(self.embedding(tokens))))


def empty():
    with init_empty_weights():
        model = Language().eval()
    model.head.weight = model.embedding.weight
    return model


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(0)
    model = Language().eval()
    save_model(model.state_dict(), tmp_path / "weights")
    return model


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@needs_bitsandbytes
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_quantized_as_they_are_loaded(kind, trained, tmp_path):
    config = BnbQuantizationConfig(**CONFIGS[kind])
    model = load_and_quantize_model(empty(), config, tmp_path / "weights")
    assert [type(one).__name__ for one in model.block] == [CLASSES[kind], "GELU", CLASSES[kind]]
    assert type(model.head) is torch.nn.Linear
    assert model.head.weight is model.embedding.weight
    assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (kind == "int8", kind != "int8")
    assert has_4bit_bnb_layers(model) is (kind != "int8")
    assert config.skip_modules is None
    expected, found = trained(TOKENS), model(TOKENS)
    assert 0 < (found - expected).norm() / expected.norm() < {"int8": 0.05}.get(kind, 0.3)
    loaded = load_and_quantize_model(copy.deepcopy(trained), config)
    assert torch.equal(loaded(TOKENS), found)


@needs_bitsandbytes
@pytest.mark.parametrize("kind", CONFIGS)
def test_quantized_weights_are_saved_and_loaded_as_they_are(kind, trained, tmp_path):
    config = BnbQuantizationConfig(**CONFIGS[kind])
    model = load_and_quantize_model(copy.deepcopy(trained), config)
    save_model(model.state_dict(), tmp_path / "small")
    again = load_and_quantize_model(empty(), config, tmp_path / "small")
    assert torch.equal(again(TOKENS), model(TOKENS))


@needs_bitsandbytes
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_quantized_model_is_offloaded_and_comes_back(kind, trained):
    model = load_and_quantize_model(trained, BnbQuantizationConfig(**CONFIGS[kind]))
    expected = model(TOKENS)
    attach_align_device_hook(model, "cpu", offload=True)
    for _ in range(2):
        assert torch.equal(model(TOKENS), expected)
        assert is_absent(model.block[0].weight)
    remove_hook_from_submodules(model)
    assert torch.equal(model(TOKENS), expected)


@needs_bitsandbytes
def test_modules_are_skipped_or_stay_in_float32(trained, tmp_path):
    config = BnbQuantizationConfig(
        load_in_8bit=True, skip_modules=["block.0"], keep_in_fp32_modules=["norm", "head"]
    )
    model = load_and_quantize_model(empty(), config, tmp_path / "weights")
    assert type(model.block[0]) is torch.nn.Linear
    assert model.block[0].weight.dtype is torch.float16
    assert type(model.block[2]).__name__ == "Linear8bitLt"
    assert model.norm.weight.dtype is torch.float32


@needs_bitsandbytes
def test_a_model_without_linear_layers_warns(tmp_path):
    config = BnbQuantizationConfig(load_in_8bit=True)
    with pytest.warns(UserWarning, match="no linear layer to quantize"):
        load_and_quantize_model(torch.nn.Sequential(torch.nn.LayerNorm(2)), config)


@needs_bitsandbytes
def test_weights_that_are_missing_or_of_another_model_raise(trained, tmp_path):
    config = BnbQuantizationConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="give weights_location"):
        load_and_quantize_model(empty(), config)
    model = empty()
    model.more = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match=r"does not have more\.weight, more\.bias"):
        load_and_quantize_model(model, config, tmp_path / "weights")
    model = empty()
    model.block[0] = torch.nn.Linear(64, 32, device="meta")
    with pytest.raises(CheckpointError, match=r"block\.0\.weight has shape .* of another model"):
        load_and_quantize_model(model, config, tmp_path / "weights")


@needs_bitsandbytes
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_4_bit_layers_are_not_offloaded(place, trained, tmp_path, monkeypatch):
    config = BnbQuantizationConfig(load_in_4bit=True)
    places = {"": "cuda:0", "block": place}
    monkeypatch.setattr(quantize, "_planned", lambda *args: places)
    with pytest.raises(ValueError, match="4-bit layers cannot be offloaded, and block would be"):
        load_and_quantize_model(empty(), config, tmp_path / "weights", device_map="auto")


def test_without_bitsandbytes_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install .*\[bitsandbytes\]"):
        load_and_quantize_model(Language(), BnbQuantizationConfig(load_in_8bit=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "exactly one"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "exactly one"),
        ({"load_in_8bit": 1}, "neither True nor False"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, 'neither "fp4" nor "nf4"'),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp8"}, "bnb_4bit_compute_dtype='fp8'"),
        ({"load_in_8bit": True, "torch_dtype": torch.int8}, "torch_dtype=torch.int8"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "no list"),
        ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "no number"),
    ],
)
def test_options_that_make_no_sense_raise(options, text):
    with pytest.raises(ValueError, match=text):
        BnbQuantizationConfig(**options)


def test_options_have_the_defaults_of_accelerate():
    eight, four = BnbQuantizationConfig(load_in_8bit=True), BnbQuantizationConfig(load_in_4bit=True)
    assert (eight.torch_dtype, eight.target_dtype) == (torch.float16, torch.int8)
    assert (four.torch_dtype, four.target_dtype.name) == (torch.float16, "INT4")
    assert BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16").torch_dtype is (
        torch.bfloat16
    )
    with pytest.warns(UserWarning, match="has no effect with load_in_4bit"):
        BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=3.0)


def test_the_head_and_tied_modules_are_not_converted():
    assert get_keys_to_not_convert(Language()) == ["embedding", "head"]
    base = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert get_keys_to_not_convert(base) == ["1"]
    base.base_model_prefix = "transformer"
    assert get_keys_to_not_convert(base) == []
    assert get_keys_to_not_convert(torch.nn.Linear(2, 2)) == []
