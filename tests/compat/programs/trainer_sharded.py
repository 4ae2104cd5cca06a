"""A Trainer with FSDP on two processes: training, a checkpoint, a resume, LoRA."""

from __future__ import annotations

import sys
from typing import Any

import torch
from language import OPTIONS, WORDS, language_model, losses
from outcome import report
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments


def trainer(folder: str, adapter: bool = False, **options: Any) -> Trainer:
    model: Any = language_model()
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    numbers = torch.randint(4, 4 + len(WORDS), (16, 8), generator=torch.Generator().manual_seed(2))
    rows = [{"input_ids": row, "labels": row} for row in numbers]
    sharded = {"fsdp": True, "fsdp_config": {"fsdp_version": 2}}
    arguments = TrainingArguments(folder, **(OPTIONS | sharded | options))
    return Trainer(model=model, args=arguments, train_dataset=rows)


def digits(run: Trainer) -> list[float]:
    """Return the losses of a run without their last bits.

    On CPUs Accelerate does not shard, so that the norm of the gradients, by which they are clipped,
    is summed in another order.
    """
    return [round(loss, 4) for loss in losses(run)]


folder = sys.argv[1]
first = trainer(folder, save_strategy="steps", save_steps=2, max_steps=4)
first.train()
first.save_model(f"{folder}/model")
second = trainer(folder, save_strategy="steps", save_steps=2, max_steps=4)
second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
lora = trainer(f"{folder}/lora", adapter=True, max_steps=2)
lora.train()
weights = load_file(f"{folder}/model/model.safetensors")
report(
    losses=digits(first),
    resumed=digits(second)[:4],
    shapes={name: list(weight.shape) for name, weight in weights.items()},
    lora=digits(lora),
)
