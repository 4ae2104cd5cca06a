"""Print orders of samples, and weights after a state was saved or loaded.

Run by test_state_parity.py, once on this library and once on Accelerate.
"""

from __future__ import annotations

import json
import os
import random
import sys

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader


def order(data_seed: int | None, seedable: bool, split: bool) -> list[list[int]]:
    """Return the samples of two epochs on this process."""
    set_seed(3)
    options = DataLoaderConfiguration(
        use_seedable_sampler=seedable, data_seed=data_seed, split_batches=split
    )
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))
    return [[int(sample) for batch in loader for sample in batch] for _ in range(2)]


def train(folder: str, loads: bool) -> list[float]:
    """Train two steps, save; or load; then train two steps more, and return weights and draws."""
    set_seed(4)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    accelerator.register_for_checkpointing(average)

    def steps() -> None:
        for _ in range(2):
            accelerator.backward(model(torch.randn(4, 2)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.n_averaged += 1

    if loads:
        accelerator.load_state(folder)
    else:
        steps()
        accelerator.save_state(folder)
    steps()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    draws = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    return [*weights.tolist(), *scheduler.get_last_lr(), float(average.n_averaged), *draws]


def main() -> None:
    values: list[object] = []
    if sys.argv[1] == "orders":
        cases = [(None, False, False), (5, False, False), (5, True, False), (5, False, True)]
        values = [order(*case) for case in cases]
    else:
        values = list(train(sys.argv[2], sys.argv[1] == "load"))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(values), flush=True)
    if torch.distributed.is_initialized():  # a process with an open group may abort at its end
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
