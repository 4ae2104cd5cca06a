"""Accumulation for a model of sequences: the loss of a window is that of all its tokens."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from outcome import digest, report
from torch.nn.functional import cross_entropy

WINDOW = 4
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
set_seed(1)
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lengths = [3, 9, 5, 2, 7, 4, 6, 8]
sequences = torch.randint(0, 16, (8 * accelerator.num_processes, 10))
for index, sequence in enumerate(sequences):
    sequence[lengths[index % 8] :] = -100
loader = torch.utils.data.DataLoader(sequences, batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(2):
    batches = iter(loader)
    for _ in range(len(loader) // WINDOW):
        window = [next(batches) for _ in range(WINDOW)]
        tokens = accelerator.gather(sum((batch != -100).sum() for batch in window)).sum().item()
        for index, batch in enumerate(window):
            last = index == WINDOW - 1
            with nullcontext() if last else accelerator.no_sync(model):
                logits = model(batch.clamp(min=0))
                loss = cross_entropy(
                    logits.flatten(0, 1), batch.flatten(), ignore_index=-100, reduction="sum"
                )
                # It is averaged over processes, and divided by the number of steps.
                accelerator.backward(loss * accelerator.num_processes * WINDOW / tokens)
            losses.append([loss.item(), tokens])
        optimizer.step()
        optimizer.zero_grad()
report(weights=digest(accelerator.unwrap_model(model)), losses=losses)
