"""Models, data and loops of the tests, for any engine."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accel_callbacks.distributed.topology import destroy_topology
from tests.support.bound import BOUND

PATIENCE = BOUND
SAMPLES = 48


def net() -> torch.nn.Module:
    """A model whose parameters do not divide by the ranks, with a tied weight and a buffer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 30), torch.nn.Tanh(), torch.nn.Linear(30, 30), torch.nn.Tanh(),
        torch.nn.Linear(30, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3),
    )  # fmt: skip
    model[4].weight = model[2].weight
    model.register_buffer("seen", torch.tensor(3.0))
    return model


def plugin(stage: int, offload_optimizer: str | None = None, **options: Any) -> DeepSpeedPlugin:
    # Small parameters are sharded too.
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload_optimizer is not None:
        zero["offload_optimizer"] = {"device": offload_optimizer, "pin_memory": False}
    return DeepSpeedPlugin({"zero_optimization": zero, **options})


def engine(layout: str) -> dict[str, Any]:
    """Return arguments of the Accelerator: ``"ddp"``, ``"fsdp"``, or ``"zero"`` and a stage."""
    if layout.startswith("zero"):
        return {"deepspeed_plugin": plugin(int(layout[4:5]))}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin()} if layout == "fsdp" else {}


def prepared(layout: str, window: int = 1, **options: Any) -> tuple[Any, ...]:
    options = {**engine(layout), **options}
    accel = Accelerator(cpu=True, gradient_accumulation_steps=window, timeout=PATIENCE, **options)
    model = net()
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.02},
        {"params": [p for layer in list(model)[1:] for p in layer.parameters()]},
    ]
    groups[1]["params"] = list(dict.fromkeys(groups[1]["params"]))
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 7, generator=generator)
    data = TensorDataset(inputs, inputs[:, :3].sin())
    order = torch.Generator().manual_seed(2)
    loader = DataLoader(data, 8 // accel.data_world, shuffle=True, generator=order)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return accel, *accel.prepare(model, optimizer, loader, schedule)


def train(
    job: tuple[Any, ...], clip: float | None = 0.05, save: str | None = None, at: int = 3
) -> list[float]:
    """Train for two epochs; save where ``at`` batches were delivered. Return the norms."""
    accel, model, optimizer, loader, schedule = job
    norms = []
    with accel.run("parity") as run:
        for _ in run.epochs(2):
            for number, (inputs, targets) in enumerate(loader, start=1):
                with accel.accumulate(model):
                    accel.backward((model(inputs) - targets).square().mean())
                    if accel.sync_gradients and clip is not None:
                        norms.append(float(accel.clip_grad_norm_(model.parameters(), clip)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if save is not None and number == at:
                    accel.save_state(save)
                    save = None
    return norms


def weights(job: tuple[Any, ...]) -> dict[str, list[float]] | None:
    """Return the weights as lists on rank 0, to be sent to the test; None on others."""
    accel, model = job[:2]
    state = accel.get_state_dict(model)
    found = {name: one.float().flatten().tolist() for name, one in state.items()}
    return found if accel.is_main_process else None


def finish(accel: Accelerator) -> None:
    accel.end_training()
    destroy_topology()


def run(
    layout: str, window: int = 1, clip: float | None = 0.05, **options: Any
) -> tuple[list[float], dict[str, list[float]] | None]:
    job = prepared(layout, window, **options)
    norms = train(job, clip)
    found = weights(job)
    finish(job[0])
    return norms, found


def difference(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """Return the largest difference of two sets of weights."""
    assert one.keys() == other.keys()
    return max(abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True))
