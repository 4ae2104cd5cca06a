"""All processes stop where one of them asks for it."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import set_seed
from outcome import digest, report
from problem import classifier, loaders
from torch.nn.functional import cross_entropy
from torch.optim import SGD

accelerator = Accelerator(cpu=True)
set_seed(6)
model = classifier()
optimizer = SGD(model.parameters(), lr=0.3)
model, optimizer, train = accelerator.prepare(model, optimizer, loaders()[0])
best, waited, losses = float("inf"), 0, []
for _ in range(8):
    for points, classes in train:
        loss = cross_entropy(model(points), classes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        waited = 0 if losses[-1] < best else waited + 1
        best = min(best, losses[-1])
        if waited >= 4 and accelerator.is_local_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    else:
        continue
    break
report(weights=digest(accelerator.unwrap_model(model)), losses=losses)
