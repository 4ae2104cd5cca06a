"""Train by a loop written for Accelerate, resuming from the newest folder of a listing.

Usage: wedge_loop.py FOLDER [seedable]; nothing in it is written for a library that stands in.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, EVERY, FEATURES, SAMPLES = 3, 2, 512, 96


def newest(folder: Path) -> Path | None:
    """Return the folder with the highest step."""
    states = [path for path in folder.iterdir() if path.name.startswith("step_")]
    return max(states, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "run").mkdir(exist_ok=True)
    set_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(FEATURES, FEATURES), torch.nn.GELU(), torch.nn.Dropout(0.1)),
        *(torch.nn.Linear(FEATURES, FEATURES), torch.nn.GELU(), torch.nn.Linear(FEATURES, 1)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(inputs, inputs.mean(1, keepdim=True))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    order = DataLoaderConfiguration(use_seedable_sampler=sys.argv[2:] == ["seedable"])
    accelerator = Accelerator(cpu=True, dataloader_config=order)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4 // processes, shuffle=True), scheduler
    )
    step = 0
    if (state := newest(folder / "run")) is not None:
        accelerator.load_state(state)
        step = int(state.name.removeprefix("step_"))
    for epoch in range(step // len(loader), EPOCHS):
        loader.set_epoch(epoch)
        done = step - epoch * len(loader)
        for features, target in skip_first_batches(loader, done) if done else loader:
            loss = torch.nn.functional.mse_loss(model(features), target)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if accelerator.is_main_process:
                with (folder / "progress").open("a") as file:
                    file.write(".")
            if step % EVERY == 0:
                accelerator.save_state(folder / "run" / f"step_{step}")
    if accelerator.is_main_process:
        digest = hashlib.sha256()
        for _, tensor in sorted(accelerator.unwrap_model(model).state_dict().items()):
            digest.update(tensor.detach().numpy().tobytes())
        (folder / "weights").write_text(digest.hexdigest())
    accelerator.end_training()


if __name__ == "__main__":
    main()
