"""Models of transformers as people have them, small and with random weights, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

WORDS, WIDTH = 48, 16
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(dropout: float = 0.0) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=4, n_head=4, n_positions=16, bos_token_id=0,
            eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    )


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT))


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=WIDTH, d_ff=24, d_kv=4, num_layers=2, num_heads=4,
            dropout_rate=0.0, tie_word_embeddings=True, decoder_start_token_id=0,
        )
    )  # fmt: skip


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    )


def resnet() -> Any:
    """With the statistics of one process in its norms, which depend on how a batch is cut."""
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], num_labels=5, layer_type="basic"
        )
    ).eval()


#: A decoder with packed layers, one with grouped queries and tied weights, an encoder, both, one
#: with experts, and images.
BUILDERS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "resnet": resnet,
}


def batches(kind: str, count: int = 4, length: int = 6) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of eight rows of ``length`` tokens, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        if kind == "resnet":
            pixels = torch.randn(8, 3, 16, 16, generator=generator)
            yield {"pixel_values": pixels, "labels": torch.arange(8) % 5}
            continue
        tokens = torch.randint(1, WORDS, (8, length), generator=generator)
        mask = torch.ones_like(tokens)
        mask[::2, -1] = int(kind == "t5")  # real masks, of equal losses
        yield {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
