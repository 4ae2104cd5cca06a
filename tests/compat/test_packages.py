"""What is available: packages by name, their versions, and devices that they add to torch."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from accel_callbacks import utils


def test_a_package_and_its_version():
    assert utils.is_pytest_available()
    assert utils.is_pytest_available(min_version="1.0")
    assert not utils.is_pytest_available("1000.0")
    assert not utils.is_sdaa_available(check_device=True)
    assert not utils.is_hpu_available(init_hccl=True)


@pytest.fixture
def installed(monkeypatch):
    """A function that makes a package importable, with these attributes."""
    find = importlib.util.find_spec
    packages = {}

    def install(name: str, **attributes: object) -> None:
        packages[name] = SimpleNamespace(**attributes)
        monkeypatch.setitem(sys.modules, name, packages[name])

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: packages.get(name) or find(name))
    return install


def test_a_device_of_another_vendor(monkeypatch, installed):
    assert not utils.is_npu_available()
    installed("torch_npu")
    assert utils.is_npu_available()
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: False), raising=False)
    assert not utils.is_npu_available(check_device=True)
    monkeypatch.setattr(torch.npu, "is_available", lambda: True)
    assert utils.is_npu_available(check_device=True)


def test_which_device_xla_has(installed):
    installed("torch_xla", runtime=SimpleNamespace(device_type=lambda: "TPU"))
    assert utils.is_torch_xla_available()
    assert utils.is_torch_xla_available(check_is_tpu=True)
    assert not utils.is_torch_xla_available(check_is_gpu=True)


def test_an_old_torch_has_no_mps():
    assert not utils.is_mps_available(min_version="1000.0")
