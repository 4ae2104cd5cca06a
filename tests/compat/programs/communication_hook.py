"""Gradients that are compressed between processes, by DDP's own hooks and options."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    set_seed,
)
from outcome import digest, report
from problem import classifier, loaders
from torch.nn.functional import cross_entropy
from torch.optim import SGD

options = DistributedDataParallelKwargs(
    comm_hook=DDPCommunicationHookType.FP16, gradient_as_bucket_view=True, broadcast_buffers=False
)
accelerator = Accelerator(cpu=True, kwargs_handlers=[options, InitProcessGroupKwargs()])
set_seed(5)
model = classifier()
optimizer = SGD(model.parameters(), lr=0.1)
model, optimizer, train = accelerator.prepare(model, optimizer, loaders()[0])
losses = []
for points, classes in train:
    with accelerator.accumulate(model):
        loss = cross_entropy(model(points), classes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
report(weights=digest(accelerator.unwrap_model(model)), losses=losses)
