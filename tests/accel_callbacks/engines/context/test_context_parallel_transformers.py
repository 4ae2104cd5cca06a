"""Models of transformers whose sequences ranks share: as one process, or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, ParallelismConfig
from tests.support.bound import BOUND
from tests.support.ring_attention import ring_on_cpu
from tests.support.rounding import reordered
from tests.support.sharded import quiet

# Slow, because each process imports transformers; what is refused is also tested without it.
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LENGTH, VOCABULARY = 16, 32
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}


def model_of(kind: str, **options: Any) -> Any:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    torch.manual_seed(0)
    if kind == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**COMMON, **sizes, **dropout, **options))
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**COMMON, **sizes, sliding_window=4))
    return LlamaForCausalLM(LlamaConfig(**COMMON, **sizes, **options))


def accelerator(size: int, axis: str = "cp_size") -> Accelerator:
    quiet()
    config = ParallelismConfig(**{axis: size}) if size > 1 else None
    return Accelerator(cpu=True, timeout=BOUND, parallelism_config=config)


def batch_of(padded: int = 0, at: str = "end") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, slice(-padded, None) if at == "end" else slice(padded)] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": torch.arange(LENGTH).repeat(2, 1),
        "labels": labels,
        "shift_labels": torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous(),
    }


def losses(kind: str, size: int, axis: str = "cp_size") -> list[float]:
    """The losses of some steps; whole positions would change all of them."""
    accel = accelerator(size, axis)
    model = model_of(kind)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    found = []
    with ring_on_cpu():
        for _ in range(3):
            batch = batch_of(padded=6)
            with accel.maybe_context_parallel(list(batch.values()), [1] * len(batch)):
                count = (batch["shift_labels"] != -100).sum()
                loss = model(**batch, num_items_in_batch=1).loss
                accel.backward(loss, normalizer=count)
                optimizer.step()
                optimizer.zero_grad()
            total, number = accel.reduce(torch.stack([loss.detach(), count]), "sum").tolist()
            found.append(total / number)
    return found


@pytest.mark.parametrize("axis", ["cp_size", "sp_size"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_losses_are_those_of_one_process(pool, kind, axis):
    expected = losses(kind, 1)
    assert expected[0] != pytest.approx(expected[-1], abs=1e-2)
    for found in pool.run(losses, kind, 2, axis):
        assert found == reordered(expected)


def refused(case: str) -> str:
    accel = accelerator(2)
    kind = "mistral" if case == "window" else "gpt2"
    options = {"attn_implementation": "eager"} if case == "eager" else {}
    model = accel.prepare_model(model_of(kind, **options), evaluation_mode=case == "positions")
    padded = {"left": (3, "start")}.get(case, (0,))
    batch = batch_of(*padded)
    if case == "positions":
        del batch["position_ids"]
    if case == "labels":
        del batch["shift_labels"]
    named = {key: value for key, value in batch.items() if (case, key) != ("whole", "input_ids")}
    if case == "mask":
        del named["attention_mask"]
    with (
        ring_on_cpu(),
        accel.maybe_context_parallel(list(named.values()), [1] * len(named)),
        pytest.raises(ValueError) as caught,  # noqa: PT011
    ):
        model(**batch)
    return str(caught.value)


REFUSALS = {
    "positions": "called without position_ids inside .* count positions from 0 on each rank",
    "labels": "would shift them inside of the part of each rank: pass shift_labels too",
    "whole": "got sequences of the whole length of 16 .*: name the tensor among its buffers",
    "left": "the attention_mask hides tokens before others",
    "mask": "leave attention_mask out of the call, or name it among the buffers",
    "eager": "attn_implementation='eager', which sees the tokens of one rank alone",
    "window": "has layers of sliding_attention, which context parallelism would train as full",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_call_that_would_be_wrong_is_refused(pool, case):
    for text in pool.run(refused, case):
        assert re.search(REFUSALS[case], text), text
