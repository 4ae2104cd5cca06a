"""Which modules of a model are sharded as one unit."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.fsdp.wrap import (
    _module_wrap_policy,
    _or_policy,
    lambda_auto_wrap_policy,
)

from accel_callbacks import FullyShardedDataParallelPlugin
from accel_callbacks.engines.fsdp.units import find_units, ignored_parameters
from tests.support.sharded import Block, Network

Plugin = FullyShardedDataParallelPlugin


class Language(torch.nn.Module):
    """Tells its embedding and head, as models of transformers do."""

    _no_split_modules = ("Block",)

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 30)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm = torch.nn.LayerNorm(30)
        self.head = torch.nn.Linear(30, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def names(model: torch.nn.Module, **options: object) -> list[tuple[str, ...]]:
    plugin = Plugin(**options)
    by_module = {module: name for name, module in model.named_modules()}
    found = find_units(model, plugin, ignored_parameters(model, plugin))
    return sorted(tuple(by_module[one] for one in unit.modules) for unit in found)


BLOCKS = [("blocks.0",), ("blocks.1",), ("blocks.2",)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, BLOCKS, id="repeated"),
        pytest.param({"auto_wrap_policy": "NO_WRAP"}, [], id="none"),
        pytest.param({"transformer_cls_names_to_wrap": "Block"}, BLOCKS, id="class"),
        pytest.param(
            {"transformer_cls_names_to_wrap": ["Block", "Linear"]},
            sorted([*BLOCKS, ("first",), ("last",), *[(f"blocks.{i}.linear",) for i in range(3)]]),
            id="nested classes",
        ),
        pytest.param({"min_num_params": 950}, BLOCKS, id="size"),
        pytest.param(
            {"min_num_params": 900}, [(f"blocks.{i}.linear",) for i in range(3)], id="small size"
        ),
        pytest.param({"auto_wrap_policy": "SIZE_BASED_WRAP"}, [], id="usual size"),
        pytest.param({"auto_wrap_policy": lambda m: isinstance(m, Block)}, BLOCKS, id="predicate"),
        pytest.param(
            {"auto_wrap_policy": functools.partial(print, transformer_layer_cls={Block})},
            BLOCKS,
            id="torch's by class",
        ),
        pytest.param(
            {
                "auto_wrap_policy": functools.partial(
                    _or_policy,
                    policies=[
                        functools.partial(
                            lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)
                        ),
                        functools.partial(_module_wrap_policy, module_classes={torch.nn.Conv1d}),
                    ],
                )
            },
            BLOCKS,
            id="one of several",
        ),
        pytest.param(
            {"auto_wrap_policy": functools.partial(print, min_num_params=950)},
            BLOCKS,
            id="torch's by size",
        ),
        pytest.param(
            {"ignored_modules": ["blocks.1"]}, [("blocks.0",), ("blocks.2",)], id="ignored"
        ),
    ],
)
def test_units_of_a_plain_model(options, expected):
    assert names(Network(), **options) == expected


LAYERS = [("layers.0",), ("layers.1",)]


def test_embedding_and_head_are_units_where_the_model_tells_them():
    assert names(Language()) == sorted([("embed",), *LAYERS, ("norm", "head")])
    last = [unit for unit in find_units(Language(), Plugin()) if unit.is_last]
    assert len(last) == 1
    assert len(last[0].modules) == 2


def test_tied_weights_are_left_to_the_model_itself():
    assert names(Language(tied=True)) == LAYERS


def test_a_block_that_shares_a_parameter_is_no_unit():
    model = Network()
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    assert names(model) == [("blocks.1",)]


def test_a_block_that_is_used_twice_is_one_unit():
    model = Network()
    model.blocks[2] = model.blocks[0]
    assert len(names(model)) == 2


def test_inner_units_come_first():
    model = Network()
    plugin = Plugin(transformer_cls_names_to_wrap=["Block", "Linear"])
    order = [unit.modules[0] for unit in find_units(model, plugin)]
    for block in model.blocks:
        assert order.index(block.linear) < order.index(block)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transformer_cls_names_to_wrap": "Blok"}, "Did you mean 'Block'"),
        (
            {
                "auto_wrap_policy": functools.partial(
                    _or_policy, policies=[functools.partial(print, min_num_params=9)]
                )
            },
            "a policy by size does not go with others",
        ),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "has no _no_split_modules"),
    ],
)
def test_classes_that_are_not_there_are_errors(options, text):
    with pytest.raises(ValueError, match=text):
        names(Network(), **options)


def test_ignored_modules_by_module_name_and_expression():
    model = Network()
    size = len(list(model.blocks[1].parameters()))
    for given in ([model.blocks[1]], ["blocks.1"], r"blocks\.1", [r"blocks\.[1]"]):
        assert len(ignored_parameters(model, Plugin(ignored_modules=given))) == size
    with pytest.warns(UserWarning, match="no module of Network is named 'block'"):
        assert ignored_parameters(model, Plugin(ignored_modules="block")) == []


def test_scalars_are_not_sharded():
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    assert ignored_parameters(model, Plugin()) == [model.scale]


def test_units_of_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    for tied in (False, True):
        config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
        found = names(transformers.LlamaForCausalLM(config))
        layers = [("model.layers.0",), ("model.layers.1",)]
        ends = [] if tied else [("model.embed_tokens",), ("model.norm", "lm_head")]
        assert found == sorted([*layers, *ends])
