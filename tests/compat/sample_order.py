"""Train by the Trainer, and write the samples of each step to a file for each process.

Run by test_trainer_checkpoints.py: FOLDER BATCH_SIZE NAME[:STOP_AT] ...  Each name is a run, which
stops after some steps if it says so, and resumes from what is in its folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Noted(torch.nn.Module):
    """A model that writes which samples it is trained on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self._path = path

    def forward(self, number: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        with self._path.open("a") as file:
            file.write(json.dumps(number.tolist()) + "\n")
        return {"loss": (self.scale * labels.float()).mean()}


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == self._step:
            control.should_save = control.should_training_stop = True


def train(folder: Path, size: int, stop: int) -> None:
    folder.mkdir(exist_ok=True)
    name = f"seen_{os.environ.get('WORLD_SIZE', '1')}_{os.environ.get('RANK', '0')}"
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, disable_tqdm=True, report_to=[], num_train_epochs=2,
        per_device_train_batch_size=size, save_strategy="no",
    )  # fmt: skip
    rows = [{"number": number, "labels": number} for number in range(24)]
    trainer = Trainer(Noted(folder / name), arguments, train_dataset=rows, callbacks=[Stop(stop)])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))


def main() -> None:
    folder, size, *names = sys.argv[1:]
    for name, _, stop in (name.partition(":") for name in names):
        train(Path(folder, name), int(size), int(stop or 0))


if __name__ == "__main__":
    main()
