"""Supervised fine-tuning by TRL: plainly, and packed with LoRA."""

from __future__ import annotations

import sys
from typing import Any

from datasets import Dataset
from language import ALONE, OPTIONS, language_model, losses, texts, tokenizer
from outcome import digest, report
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer


def trained(
    rows: list[str], adapter: LoraConfig | None = None, **options: Any
) -> tuple[str, list[float]]:
    arguments = SFTConfig(sys.argv[1], num_train_epochs=2, max_length=16, **OPTIONS, **options)
    trainer = SFTTrainer(
        language_model(), arguments,
        train_dataset=Dataset.from_dict({"text": rows}),
        eval_dataset=Dataset.from_dict({"text": texts(13, seed=2)}),
        processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip
    trainer.train()
    return digest(trainer.model), losses(trainer)


plain = trained(texts(12), eval_strategy="epoch" if ALONE else "no")
# Two of them, and the mark of their ends, fill a row.
halves = texts(32, shortest=7, longest=7)
packed = trained(halves, LoraConfig(r=4), packing=True, gradient_accumulation_steps=2)
report(plain=plain, packed=packed)
