"""The search for a batch size: which sizes are tried, and what is left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from accel_callbacks.addons.tuning.trial import restored
from accel_callbacks.tuning import find_batch_size


def fitting(limit: int) -> Any:
    """A step for which memory is enough up to a size; the error is that of the real allocator."""

    def step(size: int) -> None:
        if size > limit:
            torch.empty(1 << 60, dtype=torch.uint8)

    return step


def sizes(result: Any) -> list[int]:
    return [trial.batch_size for trial in result.trials]


def test_power_doubles_until_it_does_not_fit():
    result = find_batch_size(fitting(100), start=16)
    assert (result.batch_size, result.largest) == (64, 64)
    assert sizes(result) == [16, 32, 64, 128]
    assert not result.trials[-1].fits
    assert "allocate memory" in result.trials[-1].problem


def test_binsearch_goes_on_between_and_takes_off_a_margin():
    result = find_batch_size(fitting(100), start=64, mode="binsearch", margin=0.1)
    assert (result.batch_size, result.largest) == (90, 100)
    assert sizes(result)[2:] == [96, 112, 104, 100, 102, 101]


def test_the_largest_size_is_tried_and_needs_no_margin():
    result = find_batch_size(fitting(1000), start=3, max=20, mode="binsearch", margin=0.5)
    assert (result.batch_size, sizes(result)) == (20, [3, 6, 12, 20])


def test_each_size_is_trained_some_steps():
    calls: list[int] = []
    find_batch_size(calls.append, start=1, max=2, steps_per_trial=2)
    assert calls == [1, 1, 2, 2]


def test_nothing_fits():
    with pytest.raises(RuntimeError, match="a batch of 4 does not fit into memory"):
        find_batch_size(fitting(3), start=4)


def test_other_errors_are_not_taken_for_memory():
    def step(size: int) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes"):
        find_batch_size(step, restore=[model])


@pytest.mark.parametrize(
    "wrong",
    [{"start": 0}, {"start": 9, "max": 8}, {"mode": "x"}, {"steps_per_trial": 0}, {"margin": 1.0}],
)
def test_senseless_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        find_batch_size(fitting(8), **wrong)


# --- everything as before ------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Batch norm's buffers, one that is replaced, and a frozen part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.frozen = torch.nn.Dropout(0.5).eval()
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        return self.frozen(self.norm(self.layer(x)))


def everything(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_restored_is_the_same_bit_by_bit(steps_before, dtype):
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def step(size: int) -> None:
        model.train()
        model(torch.randn(size, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        random.random()

    for _ in range(steps_before):
        step(4)
    for state in optimizer.state.values():  # of a type that load_state_dict would change
        state["exp_avg"] = state["exp_avg"].double()
    model.frozen.eval()
    identities = [id(one) for one in (*model.parameters(), *model.buffers())]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before, rng = everything(model, optimizer), (torch.get_rng_state(), random.getstate())
    lr = optimizer.param_groups[0]["lr"]
    lr_before = lr.clone()
    with restored([model, optimizer, scheduler]):
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to(dtype)
        step(4)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    after = everything(model, optimizer)
    assert [one.dtype for one in after] == [one.dtype for one in before]
    assert len(after) == len(before)
    assert all(map(torch.equal, after, before))
    assert [id(one) for one in (*model.parameters(), *model.buffers())] == identities
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == lr_before
    assert len(optimizer.param_groups) == 1
    assert scheduler.last_epoch == steps_before
    assert torch.equal(torch.get_rng_state(), rng[0])
    assert random.getstate() == rng[1]
    assert model.norm.training
    assert not model.frozen.training


def test_a_search_leaves_model_and_optimizer_as_they_were():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    before = everything(model, optimizer)

    def step(size: int) -> None:
        fitting(8)(size)
        model(torch.ones(size, 4)).sum().backward()
        optimizer.step()

    assert find_batch_size(step, start=8, restore=[model, optimizer]).batch_size == 8
    assert all(map(torch.equal, everything(model, optimizer), before))
    assert not optimizer.state
    assert model.weight.grad is None


def test_what_cannot_be_restored_is_named():
    with pytest.raises(TypeError, match="int cannot be restored"):
        find_batch_size(fitting(8), restore=[3])
    with pytest.raises(ValueError, match="weight has no shape yet"):
        find_batch_size(fitting(8), restore=[torch.nn.LazyLinear(2)])


def test_the_plot_shows_what_fits_how_fast_it_is_and_what_was_found(tmp_path):
    pytest.importorskip("matplotlib")

    def step(size):
        if size > 100:
            raise torch.OutOfMemoryError("out of memory")

    result = find_batch_size(step, start=16)
    assert all((trial.seconds is not None) == trial.fits for trial in result.trials)
    (axes,) = result.plot().axes
    fits, not_fits, found = axes.lines
    assert list(fits.get_xdata()) == [16, 32, 64]
    assert all(value > 0 for value in fits.get_ydata())
    assert list(not_fits.get_xdata()) == [128]
    assert list(found.get_xdata()) == [64, 64]
    axes.figure.savefig(tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").stat().st_size > 1000
