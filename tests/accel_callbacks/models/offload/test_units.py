"""What is fetched together, and who asks for it."""

from __future__ import annotations

import torch

from accel_callbacks.models.offload.units import blocks_of, cut_units
from tests.accel_callbacks.models.offload.adapted import Language


def cut(model, blocks=None):
    found = blocks_of(model) if blocks is None else blocks
    return {unit.name: set(unit.slots) for unit in cut_units(model, lambda name: True, found)}


def test_blocks_are_whole_tied_weights_are_one_and_own_tensors_are_units():
    units = cut(Language(blocks=2))
    assert set(units) == {"", "embedding and head", "blocks.0", "blocks.1"}
    assert units[""] == {"start"}
    assert units["embedding and head"] == {"embedding.weight"}
    assert len(units["blocks.0"]) == 6


def test_no_split_modules_are_whole():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(1, 1)

    model = torch.nn.Sequential(Block(), torch.nn.Linear(1, 1))
    assert set(cut(model)) == {"0.a", "1"}
    model._no_split_modules = ["Block"]
    assert set(cut(model)) == {"0", "1"}


def test_modules_that_use_the_weights_of_others_are_whole():
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(4, 2), torch.nn.Linear(4, 4))
    assert set(cut(model, ())) == {"0", "1"}
    model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(4, 2, 8), torch.nn.Linear(4, 4))
    assert set(cut(model, ())) == {"0", "1"}


def test_no_weight_is_lost_and_none_is_twice():
    model = torch.nn.Transformer(8, 2, 2, 2, 16)
    units = cut_units(model, lambda name: True, blocks_of(model))
    names = [name for unit in units for name in unit.slots]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_module_in_two_places_has_one_slot_for_each_key():
    shared = torch.nn.Linear(1, 1)
    model = torch.nn.ModuleDict({"a": shared, "b": shared})
    (unit,) = cut_units(model, lambda name: True, ())
    assert unit.triggers == [shared]
    assert set(unit.slots) == {"a.weight", "a.bias"}
