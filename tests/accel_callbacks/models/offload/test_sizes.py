"""Sizes are those of real tensors, also where Accelerate's are not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_callbacks.utils import (
    CustomDtype,
    calculate_maximum_sizes,
    check_tied_parameters_in_config,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    find_tied_parameters,
    get_max_layer_size,
    get_module_leaves,
    get_non_persistent_buffers,
    named_module_tensors,
)


class Nested(nn.Module):
    """Two blocks, a head tied to the first, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.blocks[0][0].weight
        self.blocks[1].register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool), persistent=False)
        self.blocks[0].register_buffer("table", torch.zeros(2), persistent=False)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("2.3GB", 2_300_000_000),
        ("1MiB", 1 << 20),
        ("0.5kib", 512),
        ("8Kb", 1000),
        ("16gb", 2 * 10**9),
        ("2TB", 2 * 10**12),
        (" 7 MB ", 7 * 10**6),
        ("12B", 12),
        (99, 99),
    ],
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert convert_file_size_to_int(text) == nbytes


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "infGB", "nanGB", "5XB", "1..2GB", -1, None])
def test_what_is_no_size_is_an_error(text: object) -> None:
    with pytest.raises(ValueError, match="no size in bytes"):
        convert_file_size_to_int(text)  # type: ignore[arg-type]


def test_an_element_takes_what_torch_stores() -> None:
    kinds = [one for one in vars(torch).values() if isinstance(one, torch.dtype)]
    stored = [one for one in kinds if one.is_floating_point or one in (torch.bool, torch.int16)]
    assert len(stored) > 5
    for dtype in stored:
        assert dtype_byte_size(dtype) == torch.empty(1, dtype=dtype, device="meta").nbytes
    assert [dtype_byte_size(one) for one in CustomDtype] == [1, 0.5, 0.25]
    with pytest.raises(ValueError, match="'float32'"):
        dtype_byte_size("float32")  # type: ignore[arg-type]


def test_modules_are_the_sum_of_their_tensors() -> None:
    model = Nested()
    held = sum(one.nbytes for one in [*model.parameters(), *model.buffers()])
    sizes = compute_module_sizes(model)
    assert sizes[""] == held
    assert sizes["blocks.1"] == sizes["blocks.1.0"] + sizes["blocks.1.steps"] == 80 + 24
    assert sizes["head"] == 0  # its weight is counted where it is first
    assert compute_module_total_buffer_size(model) == 24 + 5 + 8


@pytest.mark.parametrize("dtype", ["float16", "torch.bfloat16", torch.float64, torch.float8_e4m3fn])
def test_a_dtype_gives_what_a_converted_model_holds(dtype: str | torch.dtype) -> None:
    """Accelerate counts no more than the present dtype takes, and loads in the larger one."""
    sizes = compute_module_sizes(Nested(), dtype=dtype)
    real = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    converted = Nested()
    for module in converted.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.to(real)
                    held[name] = tensor
    assert sizes[""] == sum(t.nbytes for _, t in named_module_tensors(converted, recurse=True))


def test_single_tensors_have_a_dtype_of_their_own() -> None:
    special = {"blocks.0.0.weight": CustomDtype.INT4, "blocks.1.steps": torch.int8}
    sizes = compute_module_sizes(Nested(), "float16", special)
    assert (sizes["blocks.0.0"], sizes["blocks.1.steps"]) == (8 + 8, 3)
    with pytest.raises(ValueError, match="'floaty'"):
        compute_module_sizes(Nested(), "floaty")


def test_the_largest_layers_are_named() -> None:
    model = Nested()
    sizes = compute_module_sizes(model)
    children = list(model.named_children())
    assert get_max_layer_size(children, sizes, []) == (80, ["blocks.0.0", "blocks.1.0"])
    assert get_max_layer_size(children, sizes, "Sequential") == (104, ["blocks.1"])
    assert calculate_maximum_sizes(model) == (sizes[""], (80, ["blocks.0.0", "blocks.1.0"]))
    model._no_split_modules = {"Sequential"}
    assert calculate_maximum_sizes(model)[1] == (104, ["blocks.1"])
    assert get_max_layer_size([], {}, None) == (0, [])


def test_leaves_have_nothing_inside() -> None:
    names = {"": 1, "a": 1, "a.b": 1, "ab": 1, "c": 1, "c.d": 1, "c.d.e": 1}
    assert get_module_leaves(names) == ["a.b", "ab", "c.d.e"]


def test_buffers_that_are_not_saved_are_found_by_their_full_names() -> None:
    model = Nested()
    assert get_non_persistent_buffers(model) == {"mask"}
    assert get_non_persistent_buffers(model, recurse=True) == {"mask", "table"}
    full = get_non_persistent_buffers(model, recurse=True, fqns=True)
    assert full == {"mask", "blocks.0.table"}
    every = {name for name, _ in named_module_tensors(model, recurse=True)}
    kept = named_module_tensors(model, recurse=True, remove_non_persistent=True)
    assert every - {name for name, _ in kept} == full
    assert list(named_module_tensors(model, include_buffers=False)) == []


def test_tied_names_are_in_the_order_of_the_model() -> None:
    model = Nested()
    assert find_tied_parameters(model) == [["blocks.0.0.weight", "head.weight"]]
    assert find_tied_parameters(nn.Linear(1, 1)) == []


class PreTrainedModel(nn.Module):
    """As far as the config is asked for."""

    class config:
        tie_word_embeddings = True

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head

    def __init__(self, head: nn.Module | None) -> None:
        super().__init__()
        self.head = head


def test_a_config_tells_of_ties() -> None:
    assert check_tied_parameters_in_config(PreTrainedModel(nn.Linear(1, 1)))
    assert not check_tied_parameters_in_config(PreTrainedModel(None))


@pytest.mark.parametrize("encoder_decoder", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_stacks_are_tied_where_there_are_two(encoder_decoder: bool, tied: bool) -> None:
    model = PreTrainedModel(None)
    model.config = SimpleNamespace(is_encoder_decoder=encoder_decoder, tie_encoder_decoder=tied)
    assert check_tied_parameters_in_config(model) == (encoder_decoder and tied)


def test_a_module_that_ties_its_weights_tells_of_ties() -> None:
    model = PreTrainedModel(None)
    model.inner = nn.Linear(1, 1)
    model.inner._tie_weights = lambda: None
    assert check_tied_parameters_in_config(model)
    # What is no model of transformers has no config that is asked.
    assert not check_tied_parameters_in_config(model.inner)


def test_the_config_of_the_text_tells_of_ties() -> None:
    model = PreTrainedModel(nn.Linear(1, 1))
    text = SimpleNamespace(tie_word_embeddings=True)
    model.config = SimpleNamespace(get_text_config=lambda decoder: text)
    assert check_tied_parameters_in_config(model)
    text.tie_word_embeddings = False
    assert not check_tied_parameters_in_config(model)
