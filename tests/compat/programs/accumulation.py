"""Gradient accumulation, by the context and by a plugin.

Windows are full: what is left at the end of an epoch has its own size here, and not in Accelerate.
"""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from outcome import digest, report
from problem import classifier, loaders
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR


def trained(accelerator: Accelerator) -> tuple[str, list[object]]:
    set_seed(2)
    model = classifier()
    optimizer = AdamW(model.parameters(), lr=0.01)
    model, optimizer, train, scheduler = accelerator.prepare(
        model, optimizer, loaders()[0], LinearLR(optimizer, total_iters=20)
    )
    events: list[object] = []
    for _ in range(3):
        for points, classes in train:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(points), classes)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    events.append(float(norm))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            events += [loss.item(), accelerator.sync_gradients, scheduler.get_last_lr()[0]]
    return digest(accelerator.unwrap_model(model)), events


plain = trained(Accelerator(cpu=True, gradient_accumulation_steps=4))
# Three epochs of eight batches are eight windows of three, which go on over the ends of epochs.
plugin = GradientAccumulationPlugin(num_steps=3, adjust_scheduler=False, sync_with_dataloader=False)
across = trained(Accelerator(cpu=True, gradient_accumulation_plugin=plugin))
report(plain=plain, across=across)
