"""Metrics over all processes, each sample once, and predictions in order."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, pad_across_processes, set_seed
from outcome import digest, report
from problem import classifier, loaders
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
set_seed(5)
model = classifier()
optimizer = AdamW(model.parameters(), lr=0.02)
train, held = loaders()
model, optimizer, train, held = accelerator.prepare(model, optimizer, train, held)
accuracies = []
for _ in range(3):
    model.train()
    for points, classes in train:
        loss = cross_entropy(model(points), classes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right = total = 0
    scores = []
    for points, classes in held:
        with torch.no_grad():
            logits = model(points)
        logits, classes = accelerator.gather_for_metrics((logits, classes))
        right += int((logits.argmax(-1) == classes).sum())
        total += len(classes)
        scores.append(logits.float())
    accuracies.append([right, total])
with accelerator.main_process_first():
    name = f"process {accelerator.process_index}"
names = gather_object([name])
own = torch.arange(accelerator.process_index + 2)
padded = accelerator.gather(pad_across_processes(own, dim=0, pad_index=-1)).tolist()
total = accelerator.reduce(torch.tensor([1.0 + accelerator.process_index]), reduction="mean")
with accelerator.split_between_processes(list(range(5))) as part:
    parts = gather_object(part)
report(
    weights=digest(accelerator.unwrap_model(model)),
    accuracies=accuracies,
    scores=digest({"scores": torch.cat(scores)}),
    names=names,
    padded=padded,
    total=total.tolist(),
    parts=parts,
)
