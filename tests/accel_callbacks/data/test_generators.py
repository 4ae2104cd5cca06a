"""Where torch's loader draws its base seed: on the default device, so with a generator of it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.data import order
from accel_callbacks.data.order import base_seed_generator, seeded_generator


@pytest.fixture
def drawn(monkeypatch):
    """The devices of each base seed and of its generator; "meta" has none that could be read."""
    seen = []

    def random_(tensor, generator=None):
        seen.append((tensor.device.type, generator and generator.device.type))
        return torch.zeros((), dtype=torch.int64, device="cpu")

    monkeypatch.setattr(torch.Tensor, "random_", random_)
    return seen


@pytest.mark.parametrize("workers", [0, 1])
def test_a_prepared_loader_draws_as_a_plain_one_does(drawn, workers):
    loader = DataLoader(["a", "b", "c"], 2, num_workers=workers)
    prepared = Accelerator(cpu=True).prepare(loader)
    with torch.device("meta"):
        plain = list(loader)
        assert drawn == [("meta", None)]
        assert list(prepared) == plain == [["a", "b"], ["c"]]
    assert drawn == [("meta", None)] * 2


class Gpu:
    """Stands in for torch.cuda and its generators."""

    def __init__(self):
        self.asked = []
        self.state = torch.Generator(device="cpu").manual_seed(7).get_state()

    def get_rng_state(self, device):
        self.asked.append(device)
        return self.state


def test_generators_are_of_the_default_device(monkeypatch):
    gpu, made = Gpu(), []
    real = torch.Generator

    def generator(device):
        made.append(torch.device(device))
        return real(device="cpu")

    here = torch.device("cuda", 1)
    monkeypatch.setattr(torch, "get_default_device", lambda: here)
    monkeypatch.setattr(torch, "cuda", gpu)
    monkeypatch.setattr(order.torch, "Generator", generator)
    assert seeded_generator(3).initial_seed() == 3
    copy = base_seed_generator(None)
    assert copy is not None
    assert copy.initial_seed() == 7
    assert gpu.asked == [here]
    assert made == [here, here]


def test_the_copy_of_a_generator_does_not_draw_from_it():
    for own in (None, torch.Generator(device="cpu").manual_seed(5)):
        copy = base_seed_generator(own)
        first = torch.rand(2, generator=copy)
        assert torch.equal(torch.rand(2, generator=own), first)


def test_a_device_without_random_numbers_has_no_generator():
    with torch.device("meta"):
        assert base_seed_generator(None) is None
        assert seeded_generator(2).device.type == "cpu"
