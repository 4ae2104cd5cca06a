"""Processes with unequal numbers of batches: nobody hangs, gradients and what follows are right."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, DistributedDataParallelKwargs
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed

BATCHES = (5, 3)


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


def inputs(accel: Accelerator, counts: tuple = BATCHES) -> DataLoader:
    """Batches of 1, 2, 3, ... on the first process, of 10, 20, ... on the second."""
    rank = accel.process_index
    data = torch.arange(1.0, counts[rank] + 1).reshape(-1, 1) * (1, 10)[rank]
    return DataLoader(data, batch_size=1)


def line(accel: Accelerator, make=torch.optim.SGD, **options) -> tuple:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.0)
    return accel.prepare(model, make(model.parameters(), **options))


def gradients_of_each_step() -> list:
    accel = accelerator()
    model, optimizer = line(accel, lr=1.0)
    seen = []
    with accel.join_uneven_inputs([model]):
        for batch in inputs(accel):
            accel.backward(model(batch).sum())
            seen.append(model.module.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return [seen, model.module.weight.item(), accel.current_run.global_step]


def test_each_step_averages_over_those_who_have_a_batch_and_zeros(pool):
    together = [(step + 10 * step) / 2 for step in (1, 2, 3)]
    alone = [step / 2 for step in (4, 5)]
    weight = -sum(together + alone)
    first, second = pool.run(gradients_of_each_step)
    assert first == [together + alone, weight, 5]
    assert second == [together, weight, 5]


def goes_on_afterwards(precision: str, counts: list[int]) -> list:
    """Momentum, the scheduler and the counters must be alike, or the weights would drift."""
    accel = accelerator(mixed_precision=precision)
    model, optimizer = line(accel, torch.optim.AdamW, lr=0.1)
    scheduler = accel.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    for _ in range(2):
        with accel.join_uneven_inputs([model]):
            for batch in inputs(accel, tuple(counts)):
                accel.backward((model(batch) - 1).pow(2).sum() / 64)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    (state,) = optimizer.state.values()
    moments = [state["exp_avg"].item(), state["step"].item(), scheduler.get_last_lr()]
    where = [accel.current_run.global_step, accel.precision.state_dict()]
    return [model.module.weight.item(), *moments, *where]


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("counts", [(5, 3), (2, 4), (3, 0), (2, 2)])
def test_all_processes_go_on_from_one_place(pool, precision, counts):
    first, second = pool.run(goes_on_afterwards, precision, list(counts))
    assert first == second
    assert precision == "fp16" or first[4] == 2 * max(counts)  # fp16 leaves some steps out


def in_windows(counts: list[int]) -> list:
    accel = accelerator(gradient_accumulation_steps=2)
    model, optimizer = line(accel, lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accel.join_uneven_inputs([model]):
            for batch in inputs(accel, tuple(counts)):
                with accel.accumulate(model):
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
    dropped = any("gradient window" in str(one.message) for one in caught)
    after = model.module.weight.item()
    for _ in range(2):  # the next window is a whole one, on both
        with accel.accumulate(model):
            accel.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return [after, model.module.weight.item() - after, dropped, accel.current_run.global_step]


def test_gradient_windows_are_averaged_and_end_together(pool):
    first, second = pool.run(in_windows, [6, 4])
    shared = ((1 + 2) / 2 + (10 + 20) / 2) / 2 + ((3 + 4) / 2 + (30 + 40) / 2) / 2
    assert first == second == [-(shared + (5 + 6) / 2 / 2), -1.0, False, 4]


@pytest.mark.parametrize("counts", [(5, 3), (5, 4), (3, 2)])
def test_a_window_that_is_open_at_the_end_is_dropped_with_a_word(pool, counts):
    first, second = pool.run(in_windows, list(counts))
    assert [first[2], second[2]] == [count % 2 == 1 for count in counts]
    assert first[:2] + first[3:] == second[:2] + second[3:]
    assert first[1] == -1.0


def alone_afterwards() -> float:
    """A forward on one process only must not wait for the others."""
    accel = accelerator()
    model, _ = line(accel, lr=1.0)
    with accel.join_uneven_inputs([model]):
        for batch in inputs(accel):
            accel.backward(model(batch).sum())
    model.eval()
    if accel.is_main_process:
        with torch.no_grad():
            model(torch.ones(1, 1))
    return accel.reduce(torch.tensor(1.0)).item()


def test_the_block_leaves_nothing_behind(pool):
    assert pool.run(alone_afterwards) == [2.0, 2.0]


def two_models() -> list:
    accel = accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
    one, first = line(accel, lr=1.0)
    two, second = line(accel, lr=1.0)
    frozen = accel.prepare(torch.nn.Linear(1, 1).requires_grad_(False))
    with accel.join_uneven_inputs([one, two, frozen]):
        for batch in inputs(accel):
            for model, optimizer in ((one, first), (two, second)):
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
    return [one.module.weight.item(), two.module.weight.item()]


def test_several_models_join(pool):
    assert pool.run(two_models) == [[-37.5, -37.5]] * 2


def even_inside(fails: bool) -> list:
    accel = accelerator()
    model, _ = line(accel, lr=1.0)
    loader = accel.prepare(DataLoader(torch.arange(5.0).reshape(-1, 1), batch_size=1))
    seen: list = []
    try:
        with accel.join_uneven_inputs([model], even_batches=False):
            seen += [accel.even_batches, sum(len(batch) for batch in loader)]
            if fails:
                raise KeyError("inside")
    except KeyError:
        seen.append("raised")
    total = accel.reduce(torch.tensor(float(sum(len(batch) for batch in loader)))).item()
    return [*seen, accel.even_batches, total]


def test_even_batches_is_another_one_inside_and_itself_again_after(pool):
    first, second = pool.run(even_inside, False)
    assert (first[0], first[1] + second[1]) == (False, 5)
    assert first[2:] == second[2:] == [True, 6.0]
    first, _ = pool.run(even_inside, True)
    assert first[2:] == ["raised", True, 6.0]


def not_a_model(what: str) -> None:
    accel = accelerator()
    _, optimizer = line(accel, lr=1.0)
    with accel.join_uneven_inputs([{"model": torch.nn.Linear(1, 1), "optimizer": optimizer}[what]]):
        raise AssertionError("the block must not run")


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_what_averages_nothing_is_refused(pool, what):
    for kind, text in pool.outcomes(not_a_model, what):
        assert kind == "TypeError"
        assert "as prepare() returned them" in text


def test_on_one_process_the_block_just_runs():
    accel = Accelerator(cpu=True)
    model, optimizer = line(accel, lr=1.0)
    with accel.join_uneven_inputs([model], even_batches=False):
        for batch in DataLoader(torch.ones(3, 1)):
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert (model.weight.item(), accel.even_batches) == (-3.0, True)


def a_normalizer_inside() -> float:
    accel = accelerator()
    model, optimizer = line(accel, lr=1.0)

    def train() -> None:
        with accel.join_uneven_inputs([model]):
            accel.backward(model(torch.ones(2, 1)).sum(), normalizer=2)

    with pytest.raises(RuntimeError, match="inside of join_uneven_inputs"):
        train()
    accel.wait_for_everyone()
    accel.backward(model(torch.ones(2, 1)).sum(), normalizer=2)
    optimizer.step()
    return accel.unwrap_model(model).weight.item()


def test_a_normalizer_is_refused_inside_and_works_afterwards(pool):
    assert pool.run(a_normalizer_inside) == [-1.0, -1.0]
