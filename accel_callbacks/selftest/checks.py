"""Checks of the arithmetic: repeatable, in the precision asked for, the same as one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_callbacks.accelerator import Accelerator
from accel_callbacks.distributed.rng import set_seed
from accel_callbacks.selftest.check import Expectations, Lab
from accel_callbacks.selftest.small import (
    flat_weights,
    same_on_all,
    samples,
    small_model,
    train_plainly,
)

__all__ = ["accumulation_equals_one_batch", "gradients_average", "precision_holds", "repeats"]

_BATCH = 4
_ROUNDING = 1e-4
_COMPUTED_IN = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LOW_ROUNDING = {"no": 1e-2, "fp16": 1e-2, "bf16": 4e-2, "fp8": 0.2}


def repeats(lab: Lab) -> str:
    """The same seed gives the same numbers, twice here and once on each process."""
    accel = lab.accelerator()
    rows = [_three_steps(accel.device), _three_steps(accel.device)]
    numbers = accel.gather(rows[0][None])
    expect = Expectations()
    expect.that(torch.equal(rows[0], rows[1]), "the same seed gave other weights the second time")
    differ = list(same_on_all(numbers))
    expect.that(not differ, f"ranks {differ} do not compute what rank 0 does")
    expect.done()
    return "same seed, same weights, bit by bit"


def _three_steps(device: torch.device) -> torch.Tensor:
    """Train with dropout from a seed."""
    model = small_model(dropout=0.5)
    set_seed(5)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(8, 8, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat_weights(model)


def precision_holds(lab: Lab) -> str:
    """Layers compute in the type that was configured, near enough to fp32, and it trains."""
    accel = lab.configured()
    name = accel.config.mixed_precision
    generator = torch.Generator().manual_seed(2)
    one, other = torch.randn(2, 64, 64, generator=generator).to(accel.device)
    with accel.autocast():
        product = one @ other
    expect = Expectations()
    wanted = _COMPUTED_IN.get(name)
    expect.that(wanted in (None, product.dtype), f"products are {product.dtype}, not {wanted}")
    expect.close("products and those of fp32", product.float(), one @ other, _LOW_ROUNDING[name])
    before, after, losses = _train(accel)
    expect.that(bool(after.isfinite().all()), "weights became infinite or not a number")
    expect.that(not torch.equal(before, after), "no step changed the weights")
    expect.that(losses[-1] < losses[0], f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}")
    expect.done()
    return f"{name}: {str(product.dtype).removeprefix('torch.')} products, loss falls"


def _train(accel: Accelerator) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Twelve passes over one batch."""
    inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(accel.device)
    model, optimizer = accel.prepare(inner, torch.optim.Adam(inner.parameters(), lr=0.02))
    before = flat_weights(inner).clone()
    generator = torch.Generator().manual_seed(4)
    batch = torch.randn(32, 16, generator=generator).to(accel.device)
    losses = []
    for _ in range(12 * accel.config.gradient_accumulation_steps):
        with accel.accumulate(model):
            with accel.autocast():
                loss = nn.functional.mse_loss(model(batch).float(), batch)
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return before, flat_weights(inner), losses


def gradients_average(lab: Lab) -> str:
    """Training on shares gives the weights of one process with all of the batch."""
    accel = lab.accelerator()
    world = accel.num_processes
    count = 4 * _BATCH * world
    expect = Expectations()
    mine, rows = _trained(accel, count)
    whole = [samples(count)[n : n + _BATCH * world] for n in range(0, count, _BATCH * world)]
    expect.close(
        "weights and those of one process", mine, train_plainly(whole, accel.device), _ROUNDING
    )
    differ = list(same_on_all(rows))
    expect.that(not differ, f"ranks {differ} have other weights than rank 0")
    expect.done()
    return "4 steps, as one process with the whole batch"


def accumulation_equals_one_batch(lab: Lab) -> str:
    """Micro-batches give the weights of their window as one batch, a short last window too."""
    window = max(2, lab.config.gradient_accumulation_steps)
    accel = lab.accelerator(gradient_accumulation_steps=window)
    step = _BATCH * accel.num_processes
    count = step * (window + window // 2)
    expect = Expectations()
    mine, _ = _trained(accel, count)
    whole = [samples(count)[n : n + step * window] for n in range(0, count, step * window)]
    expect.close(
        "weights and those of whole windows", mine, train_plainly(whole, accel.device), _ROUNDING
    )
    expect.done()
    return f"windows of {window} and {window // 2} micro-batches, as whole batches"


def _trained(accel: Accelerator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One epoch in a plain loop; returns the weights, and those of all processes."""
    inner = small_model()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    model, optimizer, loader = accel.prepare(inner, optimizer, DataLoader(samples(count), _BATCH))
    for inputs, targets in loader:
        with accel.accumulate(model):
            accel.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    weights = flat_weights(accel.unwrap_model(model))
    return weights, accel.gather(weights[None])
