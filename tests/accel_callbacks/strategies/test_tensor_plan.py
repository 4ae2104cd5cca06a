"""Plans of tensor parallelism: proposals, and what a style leaves cut."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from accel_callbacks.strategies.tensor_plan import STYLES, is_cut_after, propose_plan


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.q_proj, self.k_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.q_norm = torch.nn.RMSNorm(4)
        self.o_proj = torch.nn.Linear(8, 8)


class Model(torch.nn.Module):
    def __init__(self, positions: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 8)
        if positions:
            self.positions = torch.nn.Embedding(9, 8)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.norm = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 5)


def test_norms_of_heads_sum_their_gradients():
    assert propose_plan(Model()) == {
        "blocks.*.q_proj": "colwise",
        "blocks.*.k_proj": "colwise",
        "blocks.*.q_norm": "replicated_with_grad_allreduce",
        "blocks.*.o_proj": "rowwise",
    }


def test_a_plan_of_cut_sequences():
    assert propose_plan(Model(), sequence_parallel=True) == {
        "embed": "embedding_rowwise_sequence",
        "lm_head": "colwise_sequence_gather_output",
        "blocks.*.norm": "sequence_parallel",
        "blocks.*.q_proj": "colwise_sequence",
        "blocks.*.k_proj": "colwise_sequence",
        "blocks.*.q_norm": "replicated_with_grad_allreduce",
        "blocks.*.o_proj": "rowwise_sequence",
        "norm": "sequence_parallel",
    }


def test_where_a_sequence_begins_is_not_guessed():
    with pytest.raises(ValueError, match="2 embeddings and 1 heads"):
        propose_plan(Model(positions=True), sequence_parallel=True)


def test_a_gate_that_is_packed_beside_values_is_not_cut():
    gated = torch.nn.ModuleDict({"fc1": torch.nn.Linear(8, 32), "fc2": torch.nn.Linear(16, 8)})
    with pytest.raises(ValueError, match=r"'0.fc1' returns 32 features.* takes 16.*Split it"):
        propose_plan(torch.nn.Sequential(gated))


@pytest.mark.parametrize("style", STYLES)
def test_what_is_cut_after_a_style(style):
    if style.startswith("replicated"):
        assert is_cut_after(style) is None
        return
    whole = style in ("rowwise", "embedding_rowwise") or style.endswith("gather_output")
    assert is_cut_after(style) is not whole


def test_what_is_cut_after_a_style_of_torch():
    assert is_cut_after(ColwiseParallel())
    assert not is_cut_after(ColwiseParallel(output_layouts=Replicate()))
    assert not is_cut_after(RowwiseParallel())
    assert is_cut_after(SequenceParallel())
    split = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    assert is_cut_after(split)
    assert is_cut_after(object()) is None
