"""What we ask of a Mac's GPU: a stand-in refuses what MPS lacks, or does wrongly."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch

from accel_callbacks import DataLoaderConfiguration
from accel_callbacks.callbacks import DeviceStats
from accel_callbacks.data.device import device_feed, send_to_device
from accel_callbacks.data.sources import Delivery
from accel_callbacks.distributed.rng import capture_rng, restore_rng
from accel_callbacks.precision import FP16
from tests.support.fake_mps import MPS, FakeMps, MpsTensor


class Box:
    """An object that moves itself, as asked."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device, non_blocking=False):
        return Box(self.tensor.to(device, non_blocking=non_blocking))


def test_batches_are_waited_for_on_their_way_to_mps():
    batch = {"x": torch.ones(2), "rest": [Box(torch.ones(1)), UserDict(y=torch.ones(3))]}
    feed = device_feed(MPS, DataLoaderConfiguration().non_blocking)
    with FakeMps() as fake:
        (moved, _), *_ = feed(iter([(batch, Delivery(2, 2))]))
        assert [moved["x"].device, moved["rest"][0].tensor.device] == [MPS, MPS]
        assert moved["rest"][1]["y"].device == MPS
    assert fake.copies == 3


@pytest.mark.parametrize("target", [MPS, "mps", "mps:0"])
def test_nothing_goes_to_mps_without_being_waited_for(target):
    with FakeMps():
        moved = send_to_device((torch.ones(2), Box(torch.ones(2))), target, non_blocking=True)
    assert moved[0].device.type == moved[1].tensor.device.type == "mps"


def test_nothing_comes_from_mps_without_being_waited_for():
    assert send_to_device(MpsTensor(torch.ones(2)), "cpu", non_blocking=True).tolist() == [1, 1]


def test_streams_of_a_later_torch_change_nothing(monkeypatch):
    for name in ("Stream", "stream"):
        monkeypatch.setattr(torch.mps, name, None, raising=False)
    with FakeMps():
        assert send_to_device(torch.ones(2), MPS, non_blocking=True).device == MPS
        ((moved, _),) = device_feed(MPS)(iter([(torch.ones(2), Delivery(2, 2))]))
    assert moved.device == MPS


def test_the_stand_in_is_as_strict_as_mps():
    with FakeMps():
        with pytest.raises(AssertionError, match="non_blocking"):
            torch.ones(2).to("mps", non_blocking=True)
        with pytest.raises(TypeError, match="float64"):
            torch.ones(2, dtype=torch.float64).to(MPS)
        with pytest.raises(TypeError, match="float64"):
            torch.ones(2).to(MPS).double()
        with pytest.raises(AssertionError, match="pinned"):
            torch.ones(2).pin_memory()


def test_device_stats_asks_mps_without_a_device(monkeypatch):
    for name in ("current_allocated_memory", "driver_allocated_memory"):
        monkeypatch.setattr(torch.mps, name, lambda: 2**30)
    names = ("device/memory_allocated_gib", "device/memory_reserved_gib")
    assert DeviceStats(cpu=False).read(MPS) == dict.fromkeys(names, 1.0)


def test_the_generator_of_mps_is_captured_without_a_device(monkeypatch):
    states = [torch.arange(4, dtype=torch.uint8)]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    restore_rng(capture_rng(MPS), MPS)
    assert states[1].tolist() == [0, 1, 2, 3]


def fp16(monkeypatch):
    monkeypatch.setattr("accel_callbacks.precision.amp._check_device", lambda *_: None)
    return FP16(MPS)


def test_fp16_is_refused_where_the_scaler_needs_float64(monkeypatch):
    def unscale(scaler, optimizer):
        scaler._scale.double().reciprocal().float()  # that of torch 2.6

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale)
    with FakeMps(), pytest.raises(ValueError, match=r"use 'bf16', or torch 2\.8 or newer"):
        fp16(monkeypatch)


class Fused(torch.optim.SGD):
    """A fused optimizer that leaves out ``found_inf``, as those of MPS did."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(1)


@pytest.mark.parametrize(("gradient", "moved"), [(1.0, 1.0), (float("inf"), 0.0)])
def test_a_fused_optimizer_takes_no_step_that_overflowed(monkeypatch, gradient, moved):
    with FakeMps():
        precision = fp16(monkeypatch)
        weight = torch.nn.Parameter(torch.zeros(1, device=MPS))
        precision.scale(torch.zeros(1, device=MPS))
        weight.grad = torch.full((1,), gradient, device=MPS)
        assert precision.step(Fused([weight], lr=1.0), (), {})[0] == (moved == 1.0)
        assert weight.item() == moved
        precision.scale(torch.zeros(1, device=MPS))
        assert precision.scaler.get_scale() == (65536.0 if moved else 32768.0)
