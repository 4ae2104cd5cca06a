"""Local SGD: processes train alone, and average their weights every few steps."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from outcome import digest, report
from problem import classifier, loaders
from torch.nn.functional import cross_entropy
from torch.optim import SGD

accelerator = Accelerator(cpu=True)
set_seed(8)
model = classifier()
optimizer = SGD(model.parameters(), lr=0.1)
model, optimizer, train = accelerator.prepare(model, optimizer, loaders()[0])
losses = []
for _ in range(2):
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3, enabled=True) as local:
        for points, classes in train:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(points), classes)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            losses.append(loss.item())
report(weights=digest(accelerator.unwrap_model(model)), losses=losses)
