"""Train a tiny GPT-2 with transformers' Trainer, in several ways, and print what each ends with.

Run by test_trainer_parity.py, once on this library and once on Accelerate.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

WORDS, LENGTH = 32, 8
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 5},
    "bf16": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 4},
    "activation checkpointing": {"gradient_checkpointing": True},
    "checkpoints": {"save_strategy": "steps", "save_steps": 5},
    "best model": {
        **{"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6},
        "load_best_model_at_end": True,
    },
    "data seed": {"data_seed": 7},
    "no clipping": {"max_grad_norm": 0.0},
    "split batches": {"accelerator_config": {"split_batches": True}},
    "drop last": {"dataloader_drop_last": True, "per_device_train_batch_size": 5},
}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trained(folder: str, options: dict[str, Any]) -> tuple[str, float, int]:
    """Return a digest of the weights, the last loss and the number of steps."""
    set_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    config = GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes)
    model = GPT2LMHeadModel(config)
    common: dict[str, Any] = {
        **{"use_cpu": True, "per_device_train_batch_size": 2, "num_train_epochs": 2},
        **{"logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2, "report_to": []},
    }
    arguments = TrainingArguments(output_dir=folder, disable_tqdm=True, **(common | options))
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(24), eval_dataset=rows(7))
    trainer.train()
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.detach().numpy().tobytes())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return digest.hexdigest(), losses[-1], trainer.state.global_step


def main() -> None:
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            values = trained(folder, CASES[name])
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps([name, *values]), flush=True)


if __name__ == "__main__":
    main()
