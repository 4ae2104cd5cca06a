"""LLaMA and BERT of transformers under options of Megatron-LM, against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, MegatronLMPlugin
from tests.support.bound import BOUND
from tests.support.rounding import reordered
from tests.support.sharded import quiet

# Slow, because each process imports transformers; test_megatron.py has models of their kind.
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*non-ascending order"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WORDS, LENGTH = 32, 8
COMMON = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def model_of(kind: str) -> Any:
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "bert":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        sizes = {"vocab_size": WORDS, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
        return BertForMaskedLM(BertConfig(**COMMON, **sizes, **dropout))
    sizes = {"vocab_size": WORDS, "num_attention_heads": 4, "num_key_value_heads": 2}
    words = {"bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**COMMON, **sizes, **words))


def losses(kind: str, options: dict[str, Any]) -> list[float]:
    quiet()
    accel = Accelerator(
        cpu=True,
        timeout=BOUND,
        megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2, **options),
    )
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, WORDS, (32, LENGTH), generator=generator)
    loader = DataLoader(data, 4 // accel.data_world)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    found = []
    for batch in loader:
        with accel.accumulate(model):
            places = torch.arange(LENGTH).repeat(len(batch), 1)
            loss = model(input_ids=batch, labels=batch, position_ids=places).loss
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(accel.reduce(loss.detach(), "mean").item())
    return found


@cache
def alone(kind: str) -> list[float]:
    return losses(kind, {})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bert", {"tp_degree": 2, "recompute_granularity": "full"}),
        ("llama", {"tp_degree": 2, "recompute_activations": True}),
        ("llama", {"tp_degree": 2, "sequence_parallelism": True}),
        ("bert", {"use_distributed_optimizer": True}),
        ("llama", {"use_custom_fsdp": True, "recompute_granularity": "full"}),
    ],
    ids=["bert-tp", "llama-tp", "llama-sequence", "bert-optimizer", "llama-fsdp"],
)
def test_losses_are_those_of_one_process(pool, kind, options):
    pytest.importorskip("transformers")
    expected = alone(kind)
    assert expected[0] != pytest.approx(expected[-2], abs=1e-2)
    for found in pool.run(losses, kind, options):
        assert found == reordered(expected)
