"""The prepared optimizer and scheduler, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from accel_callbacks import AcceleratedOptimizer, AcceleratedScheduler, Accelerator

MAKERS = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=12),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], gamma=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [1, 3], 0.5)], milestones=[3]
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
}


def linear() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(2, 1)


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def step(accel: Accelerator, model, optimizer, *schedulers) -> None:
    accel.backward(model(torch.ones(1, 2)).sum() * 1e-3)
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    optimizer.zero_grad()


def rate(optimizer: torch.optim.Optimizer) -> float:
    return optimizer.param_groups[0]["lr"]


def plain_rates(maker, count: int) -> list[float]:
    optimizer = sgd(linear())
    scheduler = maker(optimizer)
    rates = []
    for _ in range(count):
        optimizer.step()
        scheduler.step()
        rates.append(rate(optimizer))
    return rates


def test_a_prepared_optimizer_is_an_optimizer_and_shares_everything_with_the_one_inside():
    raw = sgd(linear())
    optimizer = Accelerator(cpu=True).prepare(raw)
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is raw.param_groups
    assert optimizer.state is raw.state
    assert optimizer.defaults is raw.defaults
    assert "SGD" in repr(optimizer)


def test_the_state_dict_is_that_of_the_raw_optimizer_both_ways():
    accel, model = Accelerator(cpu=True), linear()
    optimizer = accel.prepare(sgd(model))
    step(accel, model, optimizer)
    twin = linear()
    raw = sgd(twin)
    (twin(torch.ones(1, 2)).sum() * 1e-3).backward()
    raw.step()
    ours, theirs = optimizer.state_dict(), raw.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for key, value in theirs["state"].items():
        assert torch.equal(ours["state"][key]["momentum_buffer"], value["momentum_buffer"])
    fresh = Accelerator(cpu=True).prepare(sgd(linear()))
    fresh.load_state_dict(theirs)
    assert torch.equal(
        fresh.state_dict()["state"][0]["momentum_buffer"],
        theirs["state"][0]["momentum_buffer"],
    )


def test_step_and_zero_grad_do_nothing_inside_of_a_window():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accel.prepare(m := linear(), sgd(m))
    before = model.weight.detach().clone()
    with accel.accumulate(model):
        accel.backward(model(torch.ones(1, 2)).sum())
        assert optimizer.step() is None
        optimizer.zero_grad()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None
    assert accel.current_run.global_step == 0
    with accel.accumulate(model):
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert accel.current_run.global_step == 1


def test_zero_grad_takes_set_to_none():
    accel = Accelerator(cpu=True)
    model, optimizer = accel.prepare(m := linear(), sgd(m))
    accel.backward(model(torch.ones(1, 2)).sum())
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))


def test_groups_added_later_are_trained_and_saved(tmp_path):
    accel = Accelerator(cpu=True)
    first, second = linear(), linear()
    first, second, optimizer = accel.prepare(first, second, sgd(first))
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.5})
    step(accel, second, optimizer)
    assert not torch.equal(second.weight, first.weight)
    path = accel.save_state(tmp_path / "c")
    wanted = second.weight.detach().clone()
    step(accel, second, optimizer)
    accel.load_state(path)
    assert torch.equal(second.weight, wanted)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]


def test_train_and_eval_reach_a_schedule_free_optimizer_and_spare_the_others():
    class ScheduleFree(torch.optim.SGD):
        mode = "none"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    accel, raw = Accelerator(cpu=True), ScheduleFree(linear().parameters(), lr=0.1)
    optimizer = accel.prepare(raw)
    optimizer.eval()
    assert raw.mode == "eval"
    optimizer.train()
    assert raw.mode == "train"
    plain = accel.prepare(sgd(linear()))
    plain.train()
    plain.eval()


def test_preparing_twice_gives_the_same_objects_and_keeps_the_order():
    accel, model = Accelerator(cpu=True), linear()
    raw = sgd(model)
    schedule = lr_scheduler.StepLR(raw, 1)
    s, o, m, word = accel.prepare(schedule, raw, model, "word")
    assert isinstance(s, AcceleratedScheduler)
    assert isinstance(o, AcceleratedOptimizer)
    assert (m, word) == (model, "word")
    assert accel.prepare(o) is o
    assert accel.prepare(raw) is o
    assert accel.prepare(s) is s
    assert accel.prepare(m) is m
    assert [len(accel.optimizers), len(accel.schedulers), len(accel.models)] == [1, 1, 1]


def test_a_raw_scheduler_prepared_twice_is_one_scheduler():
    accel, raw = Accelerator(cpu=True), sgd(linear())
    schedule = lr_scheduler.StepLR(raw, 1)
    accel.prepare(raw)
    assert accel.prepare(schedule) is accel.prepare(schedule)
    assert len(accel.schedulers) == 1


def test_a_raw_loader_prepared_twice_is_one_loader():
    accel = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(range(4))
    assert accel.prepare(loader) is accel.prepare(loader)
    assert len(accel.loaders) == 1


def test_a_scheduler_whose_optimizer_is_not_prepared_is_refused():
    with pytest.raises(ValueError, match="StepLR is not prepared"):
        Accelerator(cpu=True).prepare(lr_scheduler.StepLR(sgd(linear()), 1))


@pytest.mark.parametrize("on", ["raw", "prepared"])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
def test_schedulers_give_torch_s_rates_and_go_on_after_a_resume(kind, on, tmp_path):
    maker = MAKERS[kind]
    expected = plain_rates(maker, 10)

    def build():
        accel, model = Accelerator(cpu=True), linear()
        raw = sgd(model)
        model, optimizer = accel.prepare(model, raw)
        scheduler = accel.prepare(maker(raw if on == "raw" else optimizer))
        return accel, model, optimizer, scheduler

    accel, *parts = build()
    rates = []
    for _ in range(4):
        step(accel, *parts)
        rates.append(rate(parts[1]))
    accel.save_state(tmp_path / "c")
    accel, *parts = build()
    accel.load_state(tmp_path / "c")
    for _ in range(6):
        step(accel, *parts)
        rates.append(rate(parts[1]))
    assert rates == expected


def test_a_multi_step_scheduler_keeps_its_counter_through_a_checkpoint(tmp_path):
    def build():
        accel, model = Accelerator(cpu=True), linear()
        raw = sgd(model)
        return accel, accel.prepare(model, raw, MAKERS["SequentialLR"](raw))[2]

    accel, scheduler = build()
    before = scheduler._schedulers[1].milestones
    accel.save_state(tmp_path / "c")
    accel, scheduler = build()
    accel.load_state(tmp_path / "c")
    assert type(scheduler._schedulers[1].milestones) is type(before)
    assert scheduler._schedulers[1].milestones == before


def test_the_scheduler_counts_windows_not_micro_batches():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = linear()
    raw = sgd(model)
    model, optimizer, scheduler = accel.prepare(model, raw, lr_scheduler.StepLR(raw, 1, 0.5))
    rates = []
    for _ in range(4):
        with accel.accumulate(model):
            step(accel, model, optimizer, scheduler)
        rates.append(rate(optimizer))
    assert rates == [1.0, 0.5, 0.5, 0.25]
    assert scheduler.get_last_lr() == [0.25]


def test_reduce_on_plateau_gets_its_metric_and_keeps_it_through_a_checkpoint(tmp_path):
    def build():
        accel, model = Accelerator(cpu=True), linear()
        raw = sgd(model)
        plateau = lr_scheduler.ReduceLROnPlateau(raw, patience=1, factor=0.5)
        return accel, *accel.prepare(model, raw, plateau)[1:]

    accel, optimizer, scheduler = build()
    for metric in (1.0, 1.0):
        scheduler.step(metric)
    accel.save_state(tmp_path / "c")
    accel, optimizer, scheduler = build()
    accel.load_state(tmp_path / "c")
    assert rate(optimizer) == 1.0
    scheduler.step(torch.tensor(1.0))
    assert rate(optimizer) == 0.5
    assert scheduler.best == 1.0


def test_the_state_of_a_prepared_scheduler_is_that_of_the_one_inside():
    raw = sgd(linear())
    inner = lr_scheduler.StepLR(raw, 1)
    _, scheduler = Accelerator(cpu=True).prepare(raw, inner)
    assert scheduler.state_dict() == inner.state_dict()
    scheduler.load_state_dict({**inner.state_dict(), "last_epoch": 7})
    assert inner.last_epoch == 7
    with pytest.raises(AttributeError, match="nonsense"):
        _ = scheduler.nonsense


def test_two_optimizers_that_step_together_count_as_one_step():
    accel, one, two = Accelerator(cpu=True), linear(), linear()
    one, two, first, second = accel.prepare(one, two, sgd(one), sgd(two))
    for _ in range(3):
        step(accel, one, first)
        step(accel, two, second)
    assert accel.current_run.global_step == 3


def test_a_second_run_counts_its_steps_from_zero():
    accel = Accelerator(cpu=True)
    model, optimizer = accel.prepare(m := linear(), sgd(m))
    with accel.run("first") as first:
        step(accel, model, optimizer)
        step(accel, model, optimizer)
    with accel.run("second") as second:
        step(accel, model, optimizer)
    assert (first.global_step, second.global_step) == (2, 1)


def test_an_optimizer_prepared_later_moves_the_step_count_on():
    accel = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(range(3), batch_size=1)
    model, optimizer, loader = accel.prepare(m := linear(), sgd(m), loader)
    for _ in loader:
        step(accel, model, optimizer)
    finetuner = accel.prepare(sgd(model))
    for _ in loader:
        step(accel, model, finetuner)
    assert accel.current_run.global_step == 6
