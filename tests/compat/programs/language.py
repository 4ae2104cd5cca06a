"""A tiny language model with random weights, its tokenizer, and texts for it."""

from __future__ import annotations

import os
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)

WORDS = [f"word{number}" for number in range(40)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
#: Several processes share a last batch that does not fill them, as Accelerate's do not: there,
#: programs have data that fills them.
ALONE = os.environ.get("WORLD_SIZE", "1") == "1"
#: Arguments of each Trainer: on the CPU, a line of the log for each step, nothing to others.
OPTIONS: dict[str, Any] = {
    **{"use_cpu": True, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": []},
    **{"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "seed": 3},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows some words, by whitespace."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **names)


def config(**options: Any) -> LlamaConfig:
    """Return the configuration of a tiny model that knows the words."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    words = len(SPECIAL) + len(WORDS)
    return LlamaConfig(vocab_size=words, **sizes, **heads, **special, **options)


def language_model() -> LlamaForCausalLM:
    """Return a causal model; the same weights each time."""
    set_seed(0)
    return LlamaForCausalLM(config(attention_dropout=0.1))


def score_model() -> LlamaForSequenceClassification:
    """Return a model with one score for a text; the same weights each time."""
    set_seed(0)
    return LlamaForSequenceClassification(config(num_labels=1))


def texts(count: int, seed: int = 1, shortest: int = 3, longest: int = 10) -> list[str]:
    """Return texts of random words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    numbers = [torch.randint(0, len(WORDS), (n,), generator=generator).tolist() for n in lengths]
    return [" ".join(WORDS[number] for number in row) for row in numbers]


def losses(trainer: Any) -> list[float]:
    """Return all losses of the log: of each step, of each evaluation, of the run."""
    entries = trainer.state.log_history
    return [value for entry in entries for key, value in entry.items() if key.endswith("loss")]
