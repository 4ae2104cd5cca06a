"""Mistakes that training would hide: each is told once, at the line of the user, and no other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, GradScalerKwargs
from accel_callbacks.callbacks import EMA, Freeze


@contextmanager
def told() -> Iterator[list[warnings.WarningMessage]]:
    """All warnings of the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def only(caught: list[warnings.WarningMessage], words: str) -> None:
    """Exactly one warning, with these words and a line of this file."""
    assert [str(one.message) for one in caught if words not in str(one.message)] == []
    assert len(caught) == 1
    assert caught[0].filename == __file__


def line(accel: Accelerator) -> tuple:
    model = torch.nn.Linear(1, 1)
    return accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


X = torch.ones(2, 1)


# --- (a) a step outside of accumulate ---------------------------------------------------------


def test_a_step_outside_of_accumulate_is_told_once():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = line(accel)
    with told() as caught:
        for _ in range(5):
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()
    only(caught, "`with accel.accumulate(model):`")


@pytest.mark.parametrize("batches", [6, 8])
def test_a_loop_that_counts_micro_batches_itself_is_no_mistake(batches):
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = line(accel)
    with told() as caught:
        for number in range(1, batches + 1):
            accel.backward(model(X).sum())
            if number % 4 == 0 or number == batches:
                optimizer.step()
                optimizer.zero_grad()
    assert caught == []


def test_a_step_with_what_a_break_has_left_is_no_mistake():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = line(accel)
    data = accel.prepare(DataLoader(torch.ones(8, 1), 2))
    with told() as caught:
        for batch in data:
            with accel.accumulate(model):
                accel.backward(model(batch).sum())
            break
        optimizer.step()
    assert caught == []


# --- (b) loss.backward() left in place --------------------------------------------------------


def test_b_loss_backward_in_a_window_is_told_once():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = line(accel)
    with told() as caught:
        for _ in range(6):
            with accel.accumulate(model):
                model(X).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    only(caught, "loss.backward()")


def test_b_loss_backward_of_the_second_of_two_models_is_told():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    critic, step_critic = line(accel)
    maker, step_maker = line(accel)
    with told() as caught:
        for _ in range(4):
            with accel.accumulate():
                accel.backward(critic(maker(X).detach()).sum())
                step_critic.step()
                step_critic.zero_grad()
                maker(X).sum().backward()
                step_maker.step()
                step_maker.zero_grad()
    only(caught, "divided by the 2 micro-batches")


def test_b_loss_backward_past_the_scaler_is_told_before_the_scaler_fails():
    accel = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer = line(accel)
    model(X).sum().backward()
    with told() as caught, pytest.raises(RuntimeError, match=r"accel.backward\(loss\)"):
        optimizer.step()
    only(caught, "scaled for fp16")


def test_b_loss_backward_without_a_window_or_a_scaler_is_no_mistake():
    accel = Accelerator(cpu=True)
    model, optimizer = line(accel)
    with told() as caught:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert caught == []


# --- (e) a step that changes nothing ----------------------------------------------------------


def test_e_an_optimizer_of_another_model_is_told_once():
    accel = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    other = copy.deepcopy(model)
    model, optimizer = accel.prepare(model, torch.optim.SGD(other.parameters(), 0.1))
    with told() as caught:
        for _ in range(4):
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()
    only(caught, "no parameter of a prepared model")


def test_e_gradients_cleared_before_the_step_are_told():
    accel = Accelerator(cpu=True)
    model, optimizer = line(accel)
    with told() as caught:
        for _ in range(4):
            accel.backward(model(X).sum())
            optimizer.zero_grad()
            optimizer.step()
    only(caught, "none of its parameters had a gradient")


def test_e_one_step_without_gradients_before_the_loop_is_no_mistake():
    accel = Accelerator(cpu=True)
    model, optimizer = line(accel)
    with told() as caught:
        optimizer.step()
        for _ in range(3):
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert caught == []


def test_e_an_optimizer_that_steps_within_backward_is_no_mistake():
    accel = Accelerator(cpu=True)
    model, optimizer = line(accel)

    def step_now(parameter):
        parameter.data.sub_(parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    with told() as caught:
        for _ in range(4):
            accel.backward(model(X).sum())
            optimizer.step()
    assert caught == []


# --- no false alarms --------------------------------------------------------------------------


def plain(accel):
    model, optimizer = line(accel)
    for _ in range(4):
        with accel.accumulate(model):
            accel.backward(model(X).sum())
            accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def gan(accel):
    maker, step_maker = line(accel)
    critic, step_critic = line(accel)
    for _ in range(4):
        with accel.accumulate(maker, critic):
            made = maker(X)
            accel.backward(critic(made.detach()).sum() - critic(X).sum())
            step_critic.step()
            step_critic.zero_grad()
            accel.backward(critic(made).sum())
            step_maker.step()
            step_maker.zero_grad()


def closure(accel):
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=2))

    def compute():
        optimizer.zero_grad()
        loss = (model(X) - 3).square().sum()
        accel.backward(loss)
        return loss

    for _ in range(4):
        optimizer.step(compute)


def zero_rate(accel):
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    for _ in range(4):
        with accel.accumulate(model):
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()


def hooks_on_gradients(accel):
    model, optimizer = line(accel)
    model.weight.register_hook(lambda gradient: gradient * 2)
    for _ in range(4):
        with accel.accumulate(model), accel.no_sync(model):
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()


def evaluated_between(accel):
    model, optimizer = line(accel)
    for _ in range(4):
        with accel.evaluate(model):
            model(X)
        with accel.accumulate(model):
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()


def frozen_and_averaged(accel):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    accel.add_callback(Freeze({"0.*": "2 epochs"}))
    accel.add_callback(EMA(decay=0.5))
    first = torch.optim.SGD(model[0].parameters(), 0.1)
    second = torch.optim.SGD(model[1].parameters(), 0.1)
    loader = DataLoader(torch.ones(4, 1), 2)
    model, first, second, loader = accel.prepare(model, first, second, loader)
    with accel.run(resume=False) as run:
        for _ in run.epochs(4):
            for batch in loader:
                with accel.accumulate(model):
                    accel.backward(model(batch).sum())
                    for optimizer in (first, second):
                        optimizer.step()
                        optimizer.zero_grad()


LOOPS = [plain, gan, zero_rate, hooks_on_gradients, evaluated_between, frozen_and_averaged]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_ordinary_loops_raise_no_alarm(loop, steps):
    with told() as caught:
        loop(Accelerator(cpu=True, gradient_accumulation_steps=steps))
    assert [str(one.message) for one in caught] == []


def test_closures_raise_no_alarm():
    with told() as caught:
        closure(Accelerator(cpu=True))
    assert [str(one.message) for one in caught] == []


@pytest.mark.parametrize("loop", [plain, gan])
def test_steps_skipped_by_the_scaler_raise_no_alarm(loop):
    scaler = GradScalerKwargs(init_scale=2.0**40)
    accel = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaler])
    with told() as caught:
        loop(accel)
    assert accel.optimizer_step_was_skipped
    assert [str(one.message) for one in caught] == []


# --- nothing is left --------------------------------------------------------------------------


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_after_three_steps_no_hook_is_left_on_the_parameters():
    accel = Accelerator(cpu=True)
    model, optimizer = line(accel)
    assert hooks_of(model) == 2
    for _ in range(3):
        accel.backward(model(X).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert hooks_of(model) == 0
    assert accel.first_steps.run_backward is None  # loss.backward() itself


def test_free_memory_leaves_no_hook_on_the_parameters():
    accel = Accelerator(cpu=True)
    model, _ = line(accel)
    accel.free_memory()
    assert hooks_of(model) == 0


def test_a_compiled_model_is_watched_as_well():
    accel = Accelerator(cpu=True, dynamo_backend="aot_eager", gradient_accumulation_steps=2)
    with told() as caught:
        plain(accel)
    assert [one for one in caught if one.filename == __file__] == []
