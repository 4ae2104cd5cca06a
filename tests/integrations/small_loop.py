"""A plain loop over a small model, with an evaluation in each epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator


class Net(nn.Module):
    """A backbone with a BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(inputs))


@dataclass
class Done:
    """What is left of a run."""

    run: Any
    accel: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer


def data(samples: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def prepare(callbacks: Any, *, head_only: bool = False, lr: float = 0.05, **options: Any) -> Any:
    """(accelerator, model, optimizer, scheduler, training loader, validation loader)."""
    torch.manual_seed(0)
    accel = Accelerator(cpu=True, callbacks=callbacks, **options)
    net = Net()
    trained = net.head.parameters() if head_only else net.parameters()
    optimizer = torch.optim.SGD(trained, lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    train = DataLoader(data(), batch_size=4, shuffle=True)
    return accel, *accel.prepare(net, optimizer, scheduler, train, DataLoader(data(), batch_size=6))


def train(
    callbacks: Any,
    epochs: int = 3,
    *,
    resume: Any = True,
    counted: bool = True,
    scores: list[float] | None = None,
    on_epoch: Any = None,
    stage: str = "validation",
    **options: Any,
) -> Done:
    """Train three batches an epoch; ``scores`` are logged as the validation's result."""
    accel, model, optimizer, scheduler, loader, validation = prepare(callbacks, **options)
    with accel.run("small", resume=resume) as run:
        for epoch in run.epochs(epochs) if counted else range(epochs):
            for inputs, targets in loader:
                with accel.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accel.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                accel.log({"loss": loss})
            losses = []
            with accel.evaluate(model, stage=stage):
                for inputs, targets in validation:
                    losses.append(nn.functional.mse_loss(model(inputs), targets))
            value = torch.stack(losses).mean() if scores is None else scores[epoch]
            accel.log({"val_loss": value})
            if on_epoch is not None:
                on_epoch(run, model)
            if not counted and run.should_stop:
                break
    return Done(run, accel, model, optimizer)


def weights(model: nn.Module) -> list[torch.Tensor]:
    """A copy of all that the model holds."""
    return [value.clone() for value in model.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
