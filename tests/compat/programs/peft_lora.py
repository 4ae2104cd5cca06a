"""LoRA by PEFT in a Trainer: train, save, resume, load, merge."""

from __future__ import annotations

import sys

import torch
from language import ALONE, OPTIONS, WORDS, language_model, losses
from outcome import digest, report
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments


def trainer(folder: str, steps: int) -> Trainer:
    adapter = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"], task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(language_model(), adapter)
    numbers = torch.randint(4, 4 + len(WORDS), (12, 8), generator=torch.Generator().manual_seed(2))
    rows = [{"input_ids": row, "labels": row} for row in numbers]
    options = OPTIONS | {"save_strategy": "steps", "save_steps": 3, "max_steps": steps}
    options |= {"per_device_eval_batch_size": 2}
    arguments = TrainingArguments(folder, gradient_accumulation_steps=2, **options)
    return Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows[: 11 if ALONE else 4]
    )


folder = sys.argv[1]
first = trainer(folder, 6)
first.train()
whole = digest(first.model)
second = trainer(folder, 6)
second.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
loaded = PeftModel.from_pretrained(language_model(), f"{folder}/checkpoint-6")
merged = loaded.merge_and_unload()
report(
    whole=whole,
    resumed=digest(second.model) == whole,
    losses=losses(first),
    evaluation=first.evaluate()["eval_loss"],
    merged=digest(merged),
)
