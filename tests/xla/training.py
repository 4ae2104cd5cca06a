"""A short training, on whatever device there is: ``python training.py '{"window": 4}'``."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS = 8


class Model(torch.nn.Module):
    """Two layers that share a weight, with a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, bias=False)
        # Not BatchNorm1d: torch_xla averages the biased variance, and torch the unbiased one.
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("mean", torch.zeros(8))
        self.tied = torch.nn.Linear(8, 8, bias=False)
        self.tied.weight = self.inner.weight
        self.outer = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.outer(self.tied(torch.relu(self.norm(self.inner(x)))))


def parts() -> tuple[Model, torch.optim.Optimizer, DataLoader[Any]]:
    """Return the same model, optimizer and data at each call."""
    torch.manual_seed(0)
    model = Model()
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(8 * STEPS, 8, generator=draw), torch.randn(8 * STEPS, 4, generator=draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, DataLoader(TensorDataset(*data), 8)


def train(
    window: int = 1,
    precision: str = "no",
    load: str | None = None,
    save: str | None = None,
    stop: int = 2 * STEPS,
    callbacks: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train two epochs, or up to ``stop`` batches; return losses, weights and what callbacks saw.

    Args:
        load: a checkpoint to begin with.
        save: where to save a checkpoint after the last of ``stop`` batches.
        options: of the Accelerator.
    """
    from accel_callbacks import Accelerator
    from accel_callbacks.callbacks import EMA, GradientNorm, NonFinite

    ema = EMA(decay=0.5)
    own = [ema, GradientNorm(), NonFinite()] if callbacks else []
    accel = Accelerator(
        gradient_accumulation_steps=window, mixed_precision=precision, callbacks=own, **options
    )
    model, optimizer, loader = accel.prepare(*parts())
    seen = 0
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    with accel.run() as run:
        if load is not None:
            accel.load_state(load)
        for _ in run.epochs(2):
            for x, y in loader:
                with accel.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    accel.backward(loss)
                    norm = accel.clip_grad_norm_(model.parameters(), 0.5)
                    if accel.sync_gradients:
                        norms.append(norm)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                seen += 1
                if seen == stop and save is not None:
                    accel.save_state(save)
                if seen == stop:
                    break
            if seen == stop:
                break
        seen_norm = run.callback_metrics.get("grad_norm")
    if callbacks:
        norms.append(seen_norm)
        ema.copy_to(model)
    weights = accel.get_state_dict(model)
    return {
        "device": str(accel.device),
        "kind": str(accel.distributed_type.value),
        "losses": [float(one) for one in losses],
        "norms": [float(one) for one in norms],
        "weights": {name: one.cpu().tolist() for name, one in weights.items()},
    }


if __name__ == "__main__":
    print(json.dumps(train(**json.loads(sys.argv[1]))))
