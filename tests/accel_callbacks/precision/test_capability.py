"""Warnings of precisions that a device computes slowly, with a stand-in for the GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.models.fp8 import FP8
from accel_callbacks.precision import BF16, FP16

CUDA = torch.device("cuda", 0)


def made(precision, monkeypatch, capability, hip=None) -> list[str]:
    """Make a precision on a GPU of this capability; return what it warned of."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("accel_callbacks.precision.amp._check_device", lambda *_: None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        precision(CUDA)
    return [str(one.message) for one in seen if "scaler" not in str(one.message).lower()]


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (6, 1)])
def test_bf16_that_is_emulated_is_said_once_with_what_to_take(monkeypatch, capability):
    (text,) = made(BF16, monkeypatch, capability)
    assert f"compute capability {capability[0]}.{capability[1]}" in text
    assert "mixed_precision='fp16'" in text


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_bf16_of_the_hardware_is_no_warning(monkeypatch, capability):
    assert made(BF16, monkeypatch, capability) == []


def test_capabilities_of_amd_and_fp16_are_no_warning(monkeypatch):
    assert made(BF16, monkeypatch, (7, 0), hip="6.0") == []
    assert made(FP16, monkeypatch, (7, 0)) == []


def test_bf16_on_the_cpu_is_no_warning(recwarn):
    Accelerator(cpu=True, mixed_precision="bf16")
    assert [str(one.message) for one in recwarn] == []


class Float8(FP8):
    """fp8 without torchao: the layers stay as they are."""

    def __init__(self, emulate: bool) -> None:
        BF16.__init__(self, torch.device("cpu"))
        options = {"emulate": emulate, "enable_fsdp_float8_all_gather": False}
        self.float8_config = type("Config", (), options)
        self._warned_uncompiled = False

    def wrap(self, model):
        return BF16.wrap(self, model)

    def release(self, model) -> None:
        pass


def prepared(emulate: bool, *, compiled: bool, **options) -> list[str]:
    accel = Accelerator(cpu=True, **options)
    accel.precision = accel._preparer._precision = Float8(emulate)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model = torch.nn.Sequential(torch.nn.Linear(1, 1))
            accel.prepare(torch.compile(model, backend="eager") if compiled else model)
    return [str(one.message) for one in seen if "torch.compile" in str(one.message)]


def test_fp8_without_compile_is_said_once():
    (text,) = prepared(False, compiled=False)
    assert "slower than bf16" in text
    assert "dynamo_backend='inductor'" in text


def test_fp8_that_is_compiled_or_emulated_is_no_warning():
    assert prepared(False, compiled=True) == []
    assert prepared(False, compiled=False, dynamo_backend="eager") == []
    assert prepared(True, compiled=False) == []
