"""An engine from outside of the library: registered under a condition, it trains and resumes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.engines import (
    Gradients,
    SingleDevice,
    StateAccess,
    Strategy,
    register_engine,
)
from accel_callbacks.plugins.base import KwargsHandler

BATCHES = 6


@dataclass(frozen=True)
class CrateKwargs(KwargsHandler):
    """The options of the engine, by which a script asks for it."""

    role: ClassVar[str] = "the crate"
    scale: float = 1.0


class Crate(torch.nn.Module):
    """A model as the engine has it; its parameters have other names."""

    def __init__(self, inside, scale):
        super().__init__()
        self.inside, self.scale = inside, scale

    def forward(self, *args):
        return self.inside(*args) * self.scale


class CrateStates(StateAccess):
    """States as copies, which are loaded by the model."""

    def local_state_dict(self, model):
        return {name: value.clone() for name, value in super().local_state_dict(model).items()}

    def loads_in_place(self, model):
        return False


class CrateGradients(Gradients):
    """Gradients of torch; the number of backward passes."""

    def __init__(self):
        self.backwards = 0

    def backward(self, loss, **kwargs):
        self.backwards += 1
        super().backward(loss, **kwargs)


class Crates(Strategy):
    """Packs each model into a crate, and notes what it was asked."""

    name = "crates"

    def __init__(self, topology, handlers=None, parallelism=None):
        super().__init__(topology, handlers, parallelism)
        self.options = self.handlers.get(CrateKwargs)
        self.engine_plugins = (self.options,)

    @cached_property
    def gradients(self):
        return CrateGradients()

    @cached_property
    def states(self):
        return CrateStates(self.unwrap, self.topology.rank)

    def wrap(self, model):
        return Crate(model, self.options.scale)

    def unwrap(self, model):
        model = super().unwrap(model)
        return model.inside if isinstance(model, Crate) else model


@pytest.fixture(autouse=True)
def registered():
    handle = register_engine(Crates, when=lambda run: run.handlers.get(CrateKwargs) is not None)
    yield
    handle.remove()


def parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(BATCHES * 2, 4, generator=torch.Generator().manual_seed(1))
    return model, optimizer, DataLoader(data, batch_size=2)


def of_torch(scale=1.0):
    """The weights after one pass of plain torch."""
    model, optimizer, loader = parts()
    for batch in loader:
        loss = (model(batch) * scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return dict(model.state_dict())


def accelerated(scale=1.0):
    accel = Accelerator(cpu=True, kwargs_handlers=[CrateKwargs(scale=scale)])
    return accel, *accel.prepare(*parts())


def train(accel, model, optimizer, loader, save_at=None, path=None):
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        accel.backward(model(batch).square().mean())
        accel.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if number == save_at:
            return accel.save_state(path)
    return dict(accel.unwrap_model(model).state_dict())


def same(one, other):
    return one.keys() == other.keys() and all(map(torch.equal, one.values(), other.values()))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_an_own_engine_trains_as_plain_torch_does(scale):
    accel, *prepared = accelerated(scale)
    assert accel.strategy.name == "crates"
    assert isinstance(prepared[0], Crate)
    assert same(train(accel, *prepared), of_torch(scale))
    assert accel.strategy.gradients.backwards == BATCHES


def test_a_run_of_an_own_engine_resumes(tmp_path):
    path = train(*accelerated(), save_at=2, path=tmp_path / "c")
    accel, *prepared = accelerated()
    accel.load_state(path)
    assert same(train(accel, *prepared), of_torch())
    assert accel.strategy.gradients.backwards == BATCHES - 3


def test_its_checkpoints_are_those_of_any_engine(tmp_path):
    path = train(*accelerated(), save_at=2, path=tmp_path / "c")
    accel = Accelerator(cpu=True)
    prepared = accel.prepare(*parts())
    assert isinstance(accel.strategy, SingleDevice)
    accel.load_state(path)
    assert same(train(accel, *prepared), of_torch())


def test_of_several_engines_the_one_registered_last_is_asked_first():
    class Later(Crates):
        name = "later"

    def is_doubled(run):
        options = run.handlers.get(CrateKwargs)
        return options is not None and options.scale == 2.0

    handle = register_engine(Later, when=is_doubled)
    assert accelerated(2.0)[0].strategy.name == "later"
    assert accelerated(1.0)[0].strategy.name == "crates"
    handle.remove()
    assert accelerated(2.0)[0].strategy.name == "crates"
    assert Accelerator(cpu=True).strategy.name == "single"


@pytest.mark.parametrize("wrong", [torch.nn.Linear, Crates.wrap, "crates"])
def test_what_is_no_class_of_engines_is_refused(wrong):
    with pytest.raises(TypeError, match="an engine is a subclass of accel_callbacks"):
        register_engine(wrong, when=bool)
