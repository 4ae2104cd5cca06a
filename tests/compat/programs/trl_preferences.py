"""Preferences by TRL: a policy by DPO, and a reward model."""

from __future__ import annotations

import sys
from typing import Any

from datasets import Dataset
from language import OPTIONS, language_model, losses, score_model, texts, tokenizer
from outcome import digest, report
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

prompts, chosen, rejected = (texts(8, seed=seed) for seed in (1, 2, 3))
pairs = Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})
answers = pairs.remove_columns("prompt")
folder = sys.argv[1]


def ended(trainer: Any) -> tuple[str, list[float]]:
    trainer.train()
    return digest(trainer.model), losses(trainer)


policy = ended(  # against a model of reference
    DPOTrainer(
        language_model(), language_model(), args=DPOConfig(folder, num_train_epochs=2, **OPTIONS),
        train_dataset=pairs, processing_class=tokenizer(),
    )
)  # fmt: skip
adapter = ended(
    DPOTrainer(
        language_model(), args=DPOConfig(folder, gradient_accumulation_steps=2, **OPTIONS),
        train_dataset=pairs, processing_class=tokenizer(), peft_config=LoraConfig(r=4),
    )
)  # fmt: skip
reward = ended(
    RewardTrainer(
        score_model(), args=RewardConfig(folder, num_train_epochs=2, **OPTIONS),
        train_dataset=answers, processing_class=tokenizer(),
    )
)  # fmt: skip
report(policy=policy, adapter=adapter, reward=reward)
