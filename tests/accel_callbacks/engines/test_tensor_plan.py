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

from accel_callbacks.engines.tensor.plan import (
    STYLES,
    check_heads,
    check_pairs,
    check_parameters,
    cut_dim,
    is_cut_after,
    matched_parameters,
    matched_styles,
    plan_of,
    propose_plan,
)


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


_AS_THEIR_INPUT = ("local_params", "mla_kv_a_proj", "moe_identity_expert")
_WHOLE = (
    *("rowwise", "packed_rowwise", "rowwise_split_input", "embedding_rowwise"),
    *("all_reduce", "moe_tp_experts"),
)


@pytest.mark.parametrize("style", STYLES)
def test_what_is_cut_after_a_style(style):
    if style.startswith("replicated") or style in _AS_THEIR_INPUT:
        assert is_cut_after(style) is None
        return
    whole = style in _WHOLE or style.endswith("gather_output")
    assert is_cut_after(style) is not whole


def test_what_is_cut_after_a_style_of_torch():
    assert is_cut_after(ColwiseParallel())
    assert not is_cut_after(ColwiseParallel(output_layouts=Replicate()))
    assert not is_cut_after(RowwiseParallel())
    assert is_cut_after(SequenceParallel())
    split = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    assert is_cut_after(split)
    assert is_cut_after(object()) is None


# --- layers that go together ----------------------------------------------------------------------


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)


class Mixed(torch.nn.Module):
    """Attention and an MLP, whose layers have no name in common."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.embed = Block(), MLP(), torch.nn.Embedding(5, 8)


_ATTENTION = {"attention.q_proj": "colwise", "attention.o_proj": "rowwise"}


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"mlp.up": "colwise"}, "'mlp.up' leaves each rank a part of its output"),
        ({"mlp.up": ColwiseParallel()}, "'mlp.up' leaves each rank a part of its output"),
        ({"mlp.down": "rowwise"}, "'mlp.down' takes a part of its input"),
        ({"mlp.down": RowwiseParallel()}, "'mlp.down' takes a part of its input"),
        ({**_ATTENTION, "mlp.up": "colwise"}, "'mlp.up' leaves each rank"),
        ({**_ATTENTION, "mlp.down": "rowwise"}, "'mlp.down' takes a part"),
        ({"attention.q_proj": "packed_colwise:2"}, "'attention.q_proj' leaves each rank"),
        ({"embed": "rowwise"}, 'give it "embedding_rowwise"'),
    ],
)
def test_a_layer_without_the_one_that_goes_with_it_is_refused(plan, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_pairs(matched_styles(Mixed(), plan))


@pytest.mark.parametrize(
    "plan",
    [
        {"mlp.up": "colwise", "mlp.down": "rowwise"},
        {"mlp.up": ColwiseParallel(), "mlp.down": "rowwise"},
        {"mlp.up": "colwise_gather_output"},
        {"mlp.up": ColwiseParallel(output_layouts=Replicate())},
        {"mlp.down": RowwiseParallel(input_layouts=Replicate())},
        {"mlp.down": "colwise_loss_parallel", **_ATTENTION},
        {"mlp.up": ColwiseParallel(use_local_output=False)},
        {"embed": "embedding_rowwise", "mlp.down": "colwise_gather_output"},
        {"attention.q_proj": "colwise", "mlp.down": "rowwise"},  # all that there is
    ],
    ids=str,
)
def test_layers_that_go_together_are_not(plan):
    check_pairs(matched_styles(Mixed(), plan))


def test_the_parts_of_a_sequential_go_together():
    inner = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
    model = torch.nn.Sequential(inner, torch.nn.Sequential(torch.nn.Linear(8, 4)))
    check_pairs(matched_styles(model, {"0.0": "colwise", "1.0": "rowwise"}))


# --- heads ----------------------------------------------------------------------------------------


class Heads(torch.nn.Module):
    def __init__(self, **numbers: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = torch.nn.Linear(12, 12), torch.nn.Linear(12, 4)
        self.o_proj = torch.nn.Linear(12, 12)
        vars(self).update(numbers)


@pytest.mark.parametrize(
    ("numbers", "ranks", "sentence"),
    [
        ({"head_dim": 4}, 2, r"'attn' \(Heads\) has 3 heads, which tp_size=2 does not divide"),
        ({"head_dim": 2}, 3, "has 2 heads of keys and values, which tp_size=3"),
        ({"head_dim": 4}, 3, "has 1 head of keys and values, which tp_size=3"),
        ({"num_heads": 3}, 2, "has 3 heads"),
        ({"num_heads": 4, "num_key_value_heads": 1}, 2, "has 1 head of keys and values"),
    ],
)
def test_heads_that_the_ranks_do_not_divide_are_refused(numbers, ranks, sentence):
    model = torch.nn.ModuleDict({"attn": Heads(**numbers)})
    with pytest.raises(ValueError, match=sentence):
        check_heads(model, list(matched_styles(model, propose_plan(model))), ranks)


@pytest.mark.parametrize(
    "numbers", [{}, {"head_dim": 2}, {"num_heads": 4}, {"num_heads": 4, "n_kv_heads": 2}], ids=str
)
def test_heads_that_they_divide_or_that_nobody_counts_are_not(numbers):
    model = torch.nn.ModuleDict({"attn": Heads(**numbers)})
    check_heads(model, list(matched_styles(model, propose_plan(model))), 2)


def of_transformers(kind: str, heads: int, key_heads: int | None = None) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=24, n_layer=1, n_head=heads, vocab_size=8)
        return transformers.GPT2LMHeadModel(config)
    if kind == "t5":
        config = transformers.T5Config(
            d_model=24, d_kv=6, d_ff=48, num_layers=1, num_heads=heads, vocab_size=8
        )
        return transformers.T5ForConditionalGeneration(config)
    common = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 8}
    if kind == "bert":
        config = transformers.BertConfig(num_attention_heads=heads, **common)
        return transformers.BertForMaskedLM(config)
    config = transformers.LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=key_heads, **common
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("kind", "heads", "sentence"),
    [
        ("llama", (3, 3), r"self_attn' \(LlamaAttention\) has 3 heads, which tp_size=2"),
        ("llama", (4, 1), r"\(LlamaAttention\) has 1 head of keys and values, which tp_size=2"),
        ("bert", (3,), r"\(BertSelfAttention\) has 3 heads"),
        ("gpt2", (3,), r"\(GPT2Attention\) has 3 heads"),
        ("t5", (3,), r"\(T5Attention\) has 3 heads"),
        ("llama", (4, 2), ""),
        ("bert", (4,), ""),
        ("gpt2", (4,), ""),
        ("t5", (4,), ""),
    ],
)
def test_heads_of_models_of_transformers(kind, heads, sentence):
    model = of_transformers(kind, *heads)
    plan = plan_of(model) or propose_plan(model)
    chosen = list(matched_styles(model, plan))
    check_pairs(chosen)
    if not sentence:
        check_heads(model, chosen, 2)
        return
    with pytest.raises(ValueError, match=sentence):
        check_heads(model, chosen, 2)


def test_attention_of_gpt2_and_t5_is_proposed():
    assert propose_plan(of_transformers("gpt2", 4)) == {
        "transformer.h.*.attn.c_attn": "packed_colwise:3",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }
    plan = propose_plan(of_transformers("t5", 4))
    layers = {name.partition(".layer.*.")[2]: style for name, style in plan.items()}
    assert layers == {
        "SelfAttention.q": "colwise",
        "SelfAttention.k": "colwise",
        "SelfAttention.v": "colwise",
        "SelfAttention.o": "rowwise",
        "SelfAttention.relative_attention_bias": "colwise",
        "EncDecAttention.q": "colwise",
        "EncDecAttention.k": "colwise",
        "EncDecAttention.v": "colwise",
        "EncDecAttention.o": "rowwise",
        "DenseReluDense.wi": "colwise",
        "DenseReluDense.wo": "rowwise",
    }


# --- parameters that a plan names -----------------------------------------------------------------


class Experts(torch.nn.Module):
    def __init__(self, features: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.ones(2, 2 * features, 3))
        self.down = torch.nn.Parameter(torch.ones(2, 3, features))
        self.bias = torch.nn.Parameter(torch.ones(2, 3)) if bias else None


_EXPERTS = {
    "experts.gate_up": "packed_colwise",
    "experts.down": "rowwise",
    "experts": "moe_tp_experts",
}


def check_experts(plan: dict[str, str], experts: torch.nn.Module) -> None:
    model = torch.nn.ModuleDict({"experts": experts})
    check_parameters(matched_parameters(model, plan), list(matched_styles(model, plan)), 2)


def test_parameters_of_experts_are_cut_along_their_features():
    check_experts(_EXPERTS, Experts())
    experts = Experts()
    assert cut_dim(experts.gate_up, "packed_colwise") == 1
    assert cut_dim(experts.gate_up, "packed_rowwise") == cut_dim(experts.down, "rowwise") == 2
    assert cut_dim(torch.ones(4), "colwise") == 0
    assert cut_dim(torch.ones(4), "replicated") is None


@pytest.mark.parametrize(
    ("plan", "experts", "sentence"),
    [
        (_EXPERTS, Experts(features=3), "cuts each of 2 equal parts over 2 ranks: choose"),
        (_EXPERTS, Experts(bias=True), "each would add 'bias', of shape"),
        ({"experts": "moe_tp_experts"}, Experts(), "each would add 'gate_up', of shape"),
        ({"experts.down": "rowwise"}, Experts(), "give 'experts' the style \"moe_tp_experts\""),
        ({**_EXPERTS, "experts.down": "sequence_split"}, Experts(), "is a parameter and no layer"),
        ({**_EXPERTS, "experts.up": "colwise"}, Experts(), "has no such module"),
    ],
)
def test_parameters_that_cannot_be_cut_are_refused(plan, experts, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_experts(plan, experts)


def test_a_layer_of_queries_keys_and_values_by_head_has_whole_heads():
    attention = torch.nn.ModuleDict({"query_key_value": torch.nn.Linear(6, 18)})
    attention.num_attention_heads = 3
    layer = attention["query_key_value"]
    with pytest.raises(ValueError, match="has 3 heads, which tp_size=2"):
        check_heads(attention, [("query_key_value", layer, "colwise_by_head")], 2)
