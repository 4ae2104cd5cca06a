"""Checkpoints by epoch and by step, and a resume from each with the rest of the samples."""

from __future__ import annotations

import os
import sys

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from outcome import digest, report
from problem import classifier, loaders
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

folder = sys.argv[1]
EPOCHS = 3


def run(resume: str | None = None) -> tuple[str, list[float]]:
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(project_dir=folder, total_limit=2),
    )
    set_seed(9)
    model = classifier()
    optimizer = AdamW(model.parameters(), lr=0.01)
    train, _ = loaders()
    steps = EPOCHS * len(train)
    model, optimizer, train, schedule = accelerator.prepare(
        model, optimizer, train, OneCycleLR(optimizer, 0.05, total_steps=steps)
    )
    accelerator.register_for_checkpointing(schedule)
    epoch, step, losses = 0, 0, []
    if resume is not None:
        accelerator.load_state(os.path.join(folder, resume))
        kind, _, number = resume.partition("_")
        step = int(number) if kind == "step" else (int(number) + 1) * len(train)
        epoch = step // len(train)
    while epoch < EPOCHS:
        train.set_epoch(epoch)
        left = accelerator.skip_first_batches(train, step % len(train))
        for points, classes in left:
            loss = cross_entropy(model(points), classes)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
            if resume is None and step == 11:
                accelerator.save_state(os.path.join(folder, f"step_{step}"))
        if resume is None and epoch < EPOCHS - 1:
            accelerator.save_state(os.path.join(folder, f"epoch_{epoch}"))
        epoch += 1
    return digest(accelerator.unwrap_model(model)), losses


whole = run()
of_epoch, of_step = run("epoch_0"), run("step_11")
# What dropout draws after a resume within an epoch is another one in Accelerate.
report(
    whole=whole,
    resumed=of_epoch[0] == whole[0],
    losses=of_epoch[1],
    steps=[len(of_epoch[1]), len(of_step[1])],
)
