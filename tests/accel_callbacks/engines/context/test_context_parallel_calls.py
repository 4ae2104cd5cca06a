"""Calls of transformers models inside of the context, on a class of the same name."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch

from accel_callbacks import TorchContextParallelConfig
from accel_callbacks.engines.context.sequences import ContextParallel, token_order

LENGTH = 8


class PreTrainedModel(torch.nn.Module):
    """The base of models, as they are recognised: by name."""


PreTrainedModel.__module__ = "transformers.modeling_utils"


class Attention(torch.nn.Module):
    is_causal = True

    def forward(self, x: Any, attention_mask: Any = None) -> Any:
        return attention_mask


class FakeForCausalLM(PreTrainedModel):
    loss_type = "ForCausalLM"

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.attention = Attention()
        self.config = types.SimpleNamespace(**{"_attn_implementation": "sdpa", **config})

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs
    ):
        made = None if position_ids is None else position_ids.diff() == 1  # as of packed sequences
        return attention_mask, self.attention(input_ids, attention_mask=made)


class FakeForSequenceClassification(FakeForCausalLM):
    loss_type = "ForSequenceClassification"


def called(
    model: torch.nn.Module,
    mask: Any = None,
    *,
    active: bool = True,
    positions: Any = None,
    **inputs: Any,
) -> Any:
    """Call a model with the half of a rank, of sequences of 8."""
    context = ContextParallel(2, TorchContextParallelConfig(), lambda: None)
    context.adopt(model)
    # A copy, such as an average of weights, shares the hooks and not the context.
    model = copy.deepcopy(model)
    context.active, context._length = active, LENGTH
    half = None if mask is None else mask[:, : LENGTH // 2]
    context._whole = [] if half is None else [(half, mask)]
    own = torch.tensor([[0, 1, 6, 7]])
    if positions is not None:
        own = positions[:, [0, 1, 6, 7]]
        context._whole.append((own, positions))
    given = {"input_ids": torch.ones(1, 4), "position_ids": own, **inputs}
    return model(given.pop("input_ids"), half, **given)


def test_masks_are_dropped_inside_of_the_context_alone():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    assert called(FakeForCausalLM(), mask) == (None, None)
    kept = called(FakeForCausalLM(), mask, active=False)
    assert kept[0].shape == (1, 4)
    assert kept[1] is not None


@pytest.mark.parametrize(
    ("config", "inputs", "text"),
    [
        ({}, {"position_ids": None}, "called without position_ids"),
        ({}, {"labels": torch.ones(1, 4)}, "pass shift_labels too"),
        ({}, {"input_ids": torch.ones(1, 8)}, "name the tensor among its buffers"),
        ({}, {"mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])}, "hides tokens before others"),
        ({"_attn_implementation": "eager"}, {}, 'load it with attn_implementation="sdpa"'),
        ({"sliding_window": 4}, {}, "has layers of sliding_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, {}, "layers of chunked"),
    ],
)
def test_a_call_that_would_be_wrong_is_refused(config, inputs, text):
    with pytest.raises(ValueError, match=text):
        called(FakeForCausalLM(**config), **inputs)


PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])


def test_rows_of_several_sequences_are_refused():
    """A mask between them cannot be made; of padding at the end the positions may be any."""
    with pytest.raises(ValueError, match="start anew within a row"):
        called(FakeForCausalLM(), positions=PACKED)
    assert called(FakeForCausalLM(), positions=torch.arange(5, 5 + LENGTH)[None]) == (None, None)
    padded = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    assert called(FakeForCausalLM(), padded, positions=PACKED) == (None, None)


def test_outputs_of_whole_sequences_are_refused():
    with pytest.raises(ValueError, match="one output for a whole sequence"):
        called(FakeForSequenceClassification())
    called(FakeForSequenceClassification(), active=False)


def test_labels_that_are_shifted_before_pass():
    labels = torch.ones(1, 4)
    assert called(FakeForCausalLM(), labels=labels, shift_labels=labels) == (None, None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_a_piece_of_the_start_and_one_of_the_end(ranks):
    order = token_order(16, ranks).view(ranks, 2, -1)
    assert torch.equal(order.flatten().sort().values, torch.arange(16))
    for rank, (first, last) in enumerate(order):
        assert int(first[0]) + int(last[-1]) == 15
        assert int(first[0]) == rank * 16 // (2 * ranks)
