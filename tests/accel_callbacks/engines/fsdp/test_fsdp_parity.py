"""Sharded training against one process: losses, norms, weights and learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_callbacks import GradScalerKwargs
from tests.support.rounding import ABSOLUTE
from tests.support.sharded import Network, accelerator, flat, loader

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

#: Micro-batches of a window, samples of an epoch, and the micro-batch after which the first epoch
#: is left.
WINDOWS = {"1": (1, 64, None), "4": (4, 64, None), "broken": (4, 64, 6), "tail": (4, 48, None)}
#: fp32 differs by the order of sums alone; in 16 bits weights are rounded at other places.
TOLERANCE = {"no": ABSOLUTE, "bf16": 3e-2, "fp16": 2e-3}


def trained(layout: str, precision: str, window: str, plugin: Any = None) -> dict[str, list]:
    """Train two epochs; returns what each step saw, and the weights."""
    steps, samples, leave_at = WINDOWS[window]
    accel = accelerator(
        layout,
        plugin,
        mixed_precision=precision,
        gradient_accumulation_steps=steps,
        # Which step overflows first is up to the size of a rank's batch.
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, batches, scheduler = accel.prepare(
        model, optimizer, loader(accel, samples), scheduler
    )
    losses, norms, rates = [], [], []
    for epoch in range(2):
        for number, (inputs, targets) in enumerate(batches):
            with accel.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                # Left behind in a window that is not finished, they would show.
                accel.backward(loss * (1000 if epoch == 0 and leave_at == number else 1))
                norm = accel.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accel.reduce(loss.detach().float(), "mean")))
            if norm is not None:
                norms.append(float(norm))
                rates.append(scheduler.get_last_lr()[0])
            if epoch == 0 and leave_at == number:
                break
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "weights": flat(accel.unwrap_model(model)),
    }


def compare(found: list[dict[str, list]], precision: str, window: str) -> None:
    expected = trained("ddp", precision, window)
    tolerance = TOLERANCE[precision]
    for result in found:
        assert result["rates"] == expected["rates"]
        for name in ("losses", "norms", "weights"):
            assert result[name] == pytest.approx(expected[name], abs=tolerance, rel=tolerance)


TABLE = pytest.mark.parametrize(
    ("precision", "window"), [(p, w) for p in ("no", "bf16", "fp16") for w in WINDOWS]
)


@TABLE
def test_one_process_trains_unsharded(precision, window):
    assert trained("fsdp", precision, window) == trained("ddp", precision, window)


def turns(first: int) -> pytest.MarkDecorator:
    """Two ranks and four take turns with each precision and window."""
    return pytest.mark.parametrize(
        ("precision", "window"),
        [
            (p, w)
            for j, p in enumerate(["no", "bf16", "fp16"])
            for k, w in enumerate(WINDOWS)
            if (j + k) % 2 == first
        ],
    )


@turns(0)
def test_two_shards_train_as_one_process_does(pool, precision, window):
    compare(pool.run(trained, "fsdp", precision, window), precision, window)


@turns(1)
def test_replicas_of_shards_train_as_one_process_does(pool_of_4, precision, window):
    compare(pool_of_4.run(trained, "hsdp", precision, window), precision, window)


@pytest.mark.slow
@TABLE
def test_four_shards_train_as_one_process_does(pool_of_4, precision, window):
    compare(pool_of_4.run(trained, "fsdp", precision, window), precision, window)
