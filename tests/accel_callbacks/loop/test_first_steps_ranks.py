"""Gradients that were not averaged are told, and ordinary loops on two processes raise no alarm."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, LocalSGD
from accel_callbacks.callbacks import EMA, Freeze
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


def line(accel: Accelerator) -> tuple:
    net = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    return net, model, optimizer


X = torch.ones(2, 1)


def told_by(loop: str, *options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        globals()[loop](*options)
    return [f"{one.filename == __file__} {one.message}" for one in caught]


def past_the_wrapper(how: str) -> None:
    accel = accelerator()
    net, model, optimizer = line(accel)
    called = {"before": net, "unwrapped": accel.unwrap_model(model), "module": model.module}[how]
    for _ in range(4):
        accel.backward(called(X).sum())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["before", "unwrapped", "module"])
def test_c_a_model_called_past_its_wrapper_is_told_once_to_both_ranks(pool, how):
    (text,), second = pool.run(told_by, "past_the_wrapper", how)
    assert text.startswith("True the gradients of Linear were not averaged over the processes")
    assert second == [text]


def layer_by_layer() -> None:
    accel = accelerator()
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    net.encoder = net[0]
    model, optimizer = accel.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(4):
        accel.backward(model.encoder(X).sum())
        optimizer.step()
        optimizer.zero_grad()


def test_c_a_layer_that_is_called_by_itself_is_told(pool):
    (text,), second = pool.run(told_by, "layer_by_layer")
    assert "the gradients of Sequential were not averaged" in text
    assert second == [text]


def a_window_past_the_wrapper() -> None:
    accel = accelerator(gradient_accumulation_steps=2)
    net, model, optimizer = line(accel)
    for _ in range(4):
        with accel.accumulate(model):
            accel.backward(net(X).sum())
            optimizer.step()
            optimizer.zero_grad()


def test_c_a_window_past_the_wrapper_is_told(pool):
    (text,), second = pool.run(told_by, "a_window_past_the_wrapper")
    assert "were not averaged" in text
    assert second == [text]


def windows() -> None:
    accel = accelerator(gradient_accumulation_steps=2)
    _, model, optimizer = line(accel)
    for _ in range(8):
        with accel.accumulate(model):
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()


def local_steps() -> None:
    accel = accelerator()
    _, model, optimizer = line(accel)
    with LocalSGD(accel, model, local_sgd_steps=2) as local_sgd:
        for _ in range(4):
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()


def unsynced() -> None:
    accel = accelerator()
    net, model, optimizer = line(accel)
    for called in (model, net, model):
        with model.no_sync():
            accel.backward(called(X).sum())
        optimizer.step()
        optimizer.zero_grad()


def triggered() -> None:
    accel = accelerator()
    _, model, optimizer = line(accel)
    for _ in range(4):
        with accel.no_sync(model):
            loss = model(X).sum() + model(X * 2).sum()
        with accel.trigger_sync_in_backward(model):
            accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def gan() -> None:
    accel = accelerator()
    _, maker, step_maker = line(accel)
    _, critic, step_critic = line(accel)
    for _ in range(4):
        made = maker(X)
        accel.backward(critic(made.detach()).sum())
        step_critic.step()
        step_critic.zero_grad()
        accel.backward(critic(made).sum())
        step_maker.step()
        step_maker.zero_grad()


def in_two_parts() -> None:
    """The encoder is prepared by itself too, and trained through the model that has it."""
    accel = accelerator()
    whole = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    part = accel.prepare(whole[0])
    whole, optimizer = accel.prepare(whole, torch.optim.SGD(part.parameters(), 0.1))
    for _ in range(4):
        accel.backward(whole(X).sum())
        optimizer.step()
        optimizer.zero_grad()


def frozen() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    accel = accelerator(callbacks=[Freeze({"0.*": "3 epochs"}), EMA(decay=0.5)])
    parts = (torch.optim.SGD(part.parameters(), 0.1) for part in net)
    model, first, second, data = accel.prepare(net, *parts, DataLoader(torch.ones(4, 1), 1))
    with accel.run(resume=False) as run:
        for _ in run.epochs(4):
            for batch in data:
                accel.backward(model(batch).sum())
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()


def compiled_around() -> None:
    accel = accelerator()
    _, model, optimizer = line(accel)
    compiled = torch.compile(model, backend="eager")
    for _ in range(5):
        accel.backward(compiled(X).sum())
        optimizer.step()
        optimizer.zero_grad()


def evaluated() -> None:
    accel = accelerator()
    net, model, optimizer = line(accel)
    for _ in range(4):
        with accel.evaluate(model):
            net(X)
        accel.backward(model(X).sum())
        optimizer.step()
        optimizer.zero_grad()


LOOPS = ["windows", "local_steps", "unsynced", "triggered", "gan", "in_two_parts", "frozen"]


@pytest.mark.parametrize("loop", [*LOOPS, "compiled_around", "evaluated"])
def test_ordinary_loops_on_two_processes_raise_no_alarm(pool, loop):
    assert pool.run(told_by, loop) == [[], []]
