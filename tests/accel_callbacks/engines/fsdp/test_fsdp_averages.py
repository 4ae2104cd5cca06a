"""Averages of sharded weights: as those of DDP, and loaded in parts."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch

from accel_callbacks.callbacks import EMA, WeightAveraging
from accel_callbacks.gradients import local_part
from tests.accel_callbacks.models.test_large_start import bytes_read
from tests.support.rounding import reordered
from tests.support.sharded import Network, accelerator, batch_of, loader, step, whole

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


# --- the same averages as DDP's -----------------------------------------------------------------


def averaged(layout: str, options: dict[str, Any]) -> Any:
    """Train two epochs; return updates, averages, an evaluation with them, and the weights."""
    averaging = WeightAveraging(**options)
    accel = accelerator(layout, callbacks=[averaging], gradient_accumulation_steps=2)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, batches = accel.prepare(model, optimizer, loader(accel, 32))
    evaluated = []
    with accel.run("averages") as run:
        for _ in run.epochs(2):
            for inputs, targets in batches:
                with accel.accumulate(model):
                    accel.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            with accel.evaluate(model), torch.no_grad():
                evaluated.append(model(batch_of(4)).flatten().tolist())
    average = averaging.state_dict()["average"]
    return (
        averaging.updates,
        torch.cat([whole(one).flatten() for one in average.values()]).tolist(),
        evaluated,
        torch.cat([whole(p).flatten() for p in accel.unwrap_model(model).parameters()]).tolist(),
    )


@pytest.mark.parametrize(
    "options",
    [{"every_n_epochs": 1}, {"every_n_steps": 1, "start_step": 1}],
    ids=["epochs", "steps"],
)
def test_weights_are_averaged_as_under_ddp(pool, options):
    (expected, *_) = pool.run(averaged, "ddp", options)
    assert expected[0] in (2, 4)
    for updates, average, evaluated, weights in pool.run(averaged, "fsdp", options):
        assert updates == expected[0]
        assert average == reordered(expected[1])
        for own, other in zip(evaluated, expected[2], strict=True):
            assert own == reordered(other)
        assert weights == reordered(expected[3])
        assert average != reordered(weights)  # it is no copy of the last weights


# --- loads --------------------------------------------------------------------------------------

WIDE = 256


class Wide(torch.nn.Module):
    """One layer is most of it, and rows of another cannot be divided by 2."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(7, WIDE)
        self.second = torch.nn.Linear(WIDE, WIDE)
        self.norm = torch.nn.BatchNorm1d(WIDE)
        self.last = torch.nn.Linear(WIDE, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.second(self.first(x))))


def job(layout: str, seed: int, kind: Any, loaded: list[int] | None = None) -> tuple[Any, ...]:
    class Counted(kind):  # type: ignore[misc, valid-type]
        """Counts the elements of this rank in what is loaded, and all large tensors then."""

        state_key = kind.__qualname__

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if loaded is not None:
                average = state_dict["average"].values()
                loaded.append(sum(local_part(one).numel() for one in average))
                found = (one for one in gc.get_objects() if type(one) is torch.Tensor)
                loaded.append(sum(one.shape == (WIDE, WIDE) for one in found))
            super().load_state_dict(state_dict)

    averaging = Counted(every_n_steps=1)
    accel, model = accelerator(layout, callbacks=[averaging]), Wide(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return averaging, accel, *accel.prepare(model, optimizer)


def average_of(averaging: Any) -> list[float]:
    average = averaging.state_dict()["average"]
    return torch.cat([whole(one).flatten() for one in average.values()]).tolist()


def saves(layout: str, path: str, kind: Any) -> list[float]:
    averaging, accel, model, optimizer = job(layout, 0, kind)
    for _ in range(3):
        step(accel, model, optimizer, batch_of(8))
    accel.save_state(path)
    return average_of(averaging)


def loads(layout: str, path: str, kind: Any, after: bool, verify: str) -> Any:
    """Load before the callback knows the models, or ``after`` it has an average of its own."""
    counts: list[int] = []
    averaging, accel, model, optimizer = job(layout, 5, kind, counts)
    if after:
        step(accel, model, optimizer, batch_of(8))
    with bytes_read() as sizes:
        accel.load_state(path, verify=verify, strict=True)
    found = average_of(averaging)
    step(accel, model, optimizer, batch_of(8))
    return found, counts[:2], sum(sizes), average_of(averaging), averaging.updates


@pytest.mark.parametrize("kind", [EMA, WeightAveraging])
@pytest.mark.parametrize(("after", "verify"), [(False, "parts"), (True, "full")])
def test_each_rank_reads_its_part_of_an_average(pool, tmp_path, kind, after, verify):
    path = str(tmp_path / "state")
    expected = pool.run(saves, "fsdp", path, kind)[0]
    model = Wide(0)
    floats = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    rows = [math.ceil(len(t) / 2) * t[0].numel() for t in model.parameters()]
    buffers = sum(b.numel() for b in model.buffers() if b.is_floating_point())
    elements = sum(t.numel() for t in floats)
    for found, (held, large), read, later, updates in pool.run(
        loads, "fsdp", path, kind, after, verify
    ):
        assert found == expected
        assert held <= sum(rows) + buffers < 0.55 * elements
        assert large == 0  # nowhere is the largest tensor whole
        if verify == "parts":
            assert read <= (sum(rows) + buffers) * 4 * 2 + 60_000  # and what is small
        assert later != expected
        assert updates == 4


@pytest.mark.parametrize(("before", "now"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_an_average_moves_between_strategies(pool, tmp_path, before, now):
    path = str(tmp_path / "state")
    expected = pool.run(saves, before, path, EMA)[0]
    for found, *_ in pool.run(loads, now, path, EMA, False, "parts"):
        assert found == expected


def load_into_another(path: str) -> None:
    """An average with a weight that the models do not have."""
    averaging, accel, model, optimizer = job("fsdp", 0, EMA)
    step(accel, model, optimizer, batch_of(8))
    state = averaging.state_dict()
    averaging.load_state_dict({**state, "average": {**state["average"], "0.more": torch.ones(1)}})


def test_an_average_of_other_weights_is_refused(pool, tmp_path):
    for kind, text in pool.outcomes(load_into_another, str(tmp_path)):
        assert kind == "ResumeError"
        assert "'0.more' is only in the checkpoint" in text
