"""Train a small GPT-2 by the Trainer of transformers, resuming from its newest checkpoint.

Usage: wedge_trainer.py FOLDER [sft]; ``sft`` is by TRL's SFTTrainer. Nothing in it is written for a
library that stands in.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

WORDS, LENGTH, SAMPLES = 64, 8, 96


class Progress(TrainerCallback):
    """Appends a byte to a file at each step, by which the moment of a kill is chosen."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.is_world_process_zero:
            with self._path.open("a") as file:
                file.write(".")


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def tuner(model: torch.nn.Module, options: dict[str, Any], callbacks: list[Any]) -> Trainer:
    """Return an SFTTrainer on the same samples, which are tokens already."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    vocabulary = {f"word{number}": number for number in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="word0"))
    special = {"pad_token": "word0", "eos_token": "word1"}
    rows = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in samples()]})
    return SFTTrainer(
        model, SFTConfig(**options), train_dataset=rows, callbacks=callbacks,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **special),
    )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    set_seed(0)
    sizes = {"n_embd": 192, "n_layer": 3, "n_head": 4, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {
        **{"output_dir": str(folder / "run"), "use_cpu": True, "disable_tqdm": True},
        **{"per_device_train_batch_size": 4 // processes, "num_train_epochs": 2},
        **{"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3},
        **{"learning_rate": 1e-3, "logging_steps": 5, "report_to": []},
    }
    callbacks = [Progress(folder / "progress")]
    if sys.argv[2:] == ["sft"]:
        trainer = tuner(model, options, callbacks)
    else:
        arguments = TrainingArguments(**options)
        trainer = Trainer(model, arguments, train_dataset=samples(), callbacks=callbacks)
    newest = get_last_checkpoint(folder / "run") if (folder / "run").exists() else None
    trainer.train(resume_from_checkpoint=newest)
    if trainer.is_world_process_zero():
        digest = hashlib.sha256()
        for _, tensor in sorted(model.state_dict().items()):
            digest.update(tensor.detach().numpy().tobytes())
        (folder / "weights").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
