"""Checkpoints under FSDP and HSDP: every layout loads what every other one saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:the checkpoint was saved by"),
]

#: Ranks and arguments of the Accelerator.
LAYOUTS: dict[str, int] = {"one": 1, "ddp2": 2, "fsdp2": 2, "fsdp4": 4, "hsdp2x2": 4}
STEPS = 12  # micro-batches of an epoch
# Where a run saves: between two windows, in the middle of the epoch; inside of a window.
PLACES = {"between": 6, "inside": 5}


class Block(torch.nn.Module):
    """A block whose parameters do not divide by four; some have fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(7, 30)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.outer = torch.nn.Linear(30, 7)
        self.norm = torch.nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.outer(torch.tanh(self.inner(x))) * self.scale.sum())


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.out = torch.nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def accelerator(layout: str, **options: Any) -> Accelerator:
    if layout.startswith("fsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    if layout.startswith("hsdp"):
        mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        options |= {"parallelism_config": mesh, "fsdp_plugin": FullyShardedDataParallelPlugin()}
    return Accelerator(cpu=True, timeout=timedelta(seconds=40), **options)


def prepared(layout: str, seed: int = 0, window: int = 3, **options: Any) -> tuple:
    accel = accelerator(layout, gradient_accumulation_steps=window, **options)
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    torch.manual_seed(1)
    inputs = torch.randn(8 * STEPS, 7)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, 8 // accel.num_processes, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return accel, *accel.prepare(model, optimizer, loader, schedule)


def train(job: tuple, saves: dict[int, str] | None = None, counted: bool = False) -> None:
    """Go on to the end of the epoch; save after these micro-batches."""
    accel, model, optimizer, loader, schedule = job
    for number, (inputs, targets) in enumerate(loader, start=1):
        with accel.accumulate(model):
            loss = (model(inputs) - targets).square()
            if counted:
                accel.backward(loss.sum(), normalizer=loss.numel())
            else:
                accel.backward(loss.mean())
            accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if saves and number in saves:
            accel.save_state(saves[number])


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = getattr(tensor.detach(), "full_tensor", None)
    return (tensor.detach() if whole is None else whole()).clone()


def contents(job: tuple) -> dict[str, torch.Tensor]:
    """Weights, and states of the optimizer, as full tensors."""
    accel, model, optimizer, *_ = job
    bare = accel.unwrap_model(model)
    found = {name: full(value) for name, value in bare.state_dict().items()}
    for name, parameter in bare.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = full(value)
    return found


# --- every layout loads what every other one saved -------------------------------------------


def saving(layout: str, folder: str, counted: bool) -> dict[str, list]:
    """Train an epoch and save on the way; return its result."""
    job = prepared(layout)
    train(job, {at: f"{folder}/{layout}-{place}" for place, at in PLACES.items()}, counted)
    return {name: value.tolist() for name, value in contents(job).items()}


def going_on(layout: str, folder: str, place: str, counted: bool) -> list[dict[str, list]]:
    """Go on from what each layout saved, to the end of the epoch."""
    results = []
    for before in LAYOUTS:
        job = prepared(layout, seed=5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job[0].load_state(f"{folder}/{before}-{place}")
        train(job, counted=counted)
        results.append({name: value.tolist() for name, value in contents(job).items()})
    return results


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run_on(pool: Any, pool_of_4: Any) -> Run:
    """Runs a function of a layout on its ranks: one is this process."""
    pools = {2: pool, 4: pool_of_4}

    def run(layout: str, function: Run, *args: Any) -> Any:
        world = LAYOUTS[layout]
        if world == 1:
            return function(layout, *args)
        results = pools[world].run(function, layout, *args)
        assert all(result == results[0] for result in results)
        return results[0]

    return run


@pytest.fixture(scope="module", params=["mean", "counted"])
def saved(request: Any, run_on: Run, tmp_path_factory: Any) -> tuple[str, bool, dict]:
    """What a run of each layout saved and where it came to."""
    folder, counted = str(tmp_path_factory.mktemp("saved")), request.param == "counted"
    return folder, counted, {one: run_on(one, saving, folder, counted) for one in LAYOUTS}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_from_what_every_other_one_saved(run_on, saved, layout, place):
    folder, counted, wanted = saved
    results = run_on(layout, going_on, folder, place, counted)
    for before, result in zip(LAYOUTS, results, strict=True):
        assert result.keys() == wanted[before].keys()
        for name, value in result.items():
            if before == layout:
                assert value == wanted[before][name], f"{name}, not bitwise"
            here, there = torch.tensor(value), torch.tensor(wanted[before][name])
            torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6, msg=f"{before} {name}")
