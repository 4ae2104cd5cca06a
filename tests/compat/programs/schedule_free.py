"""An optimizer without a schedule, which has a mode to train in and one to evaluate in."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from outcome import digest, report
from problem import classifier, loaders
from schedulefree import AdamWScheduleFree
from torch.nn.functional import cross_entropy

accelerator = Accelerator(cpu=True)
set_seed(5)
model = classifier()
optimizer = AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=3)
train, held = loaders()
model, optimizer, train, held = accelerator.prepare(model, optimizer, train, held)
digests, rights = [], []
for _ in range(2):
    model.train()
    optimizer.train()
    for points, classes in train:
        accelerator.backward(cross_entropy(model(points), classes))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    optimizer.eval()
    digests.append(digest(accelerator.unwrap_model(model)))
    right = 0
    for points, classes in held:
        with torch.no_grad():
            guesses = model(points).argmax(-1)
        guesses, classes = accelerator.gather_for_metrics((guesses, classes))
        right += int((guesses == classes).sum())
    rights.append(right)
report(digests=digests, rights=rights)
