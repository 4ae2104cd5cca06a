"""The batch that fits, found by halving, and accumulation that makes up for it."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from outcome import digest, report
from problem import classifier, loaders
from torch.nn.functional import cross_entropy
from torch.optim import SGD

OBSERVED, FITS = 32, 8
accelerator = Accelerator(cpu=True)
tried: list[int] = []
losses: list[float] = []


@find_executable_batch_size(starting_batch_size=OBSERVED)
def train(batch_size: int, epochs: int) -> str:
    tried.append(batch_size)
    accelerator.free_memory()
    set_seed(4)
    model = classifier()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loaders(batch_size)[0])
    accelerator.gradient_accumulation_steps = OBSERVED // batch_size
    for _ in range(epochs):
        for points, classes in loader:
            if batch_size > FITS:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
            with accelerator.accumulate(model):
                loss = cross_entropy(model(points), classes)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return digest(accelerator.unwrap_model(model))


report(weights=train(2), tried=tried, losses=losses)
