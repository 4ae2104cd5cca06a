"""When a process computes through torch_xla, and when it says why it cannot (tests/xla has it)."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest

from accel_callbacks.engines.xla.device import has_xla, xla_device


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch_xla with one process and device, which tests change."""
    package, runtime = ModuleType("torch_xla"), ModuleType("torch_xla.runtime")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_xla", None)
    runtime.global_runtime_device_count = lambda: 1
    runtime.process_count = runtime.world_size = lambda: 1
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    return runtime


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"PJRT_DEVICE": "TPU"}, True),
        ({"PJRT_DEVICE": "CPU"}, True),
        ({"ACCEL_DISTRIBUTED_TYPE": "XLA"}, True),
        ({"ACCEL_DISTRIBUTED_TYPE": "FSDP"}, False),
    ],
)
def test_variables_ask_for_xla(runtime: Any, env: dict[str, str], expected: bool) -> None:
    assert has_xla(env) is expected


def test_variables_for_jax_alone_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not has_xla({"PJRT_DEVICE": "TPU"})


@pytest.mark.parametrize("asked", ["WORLD_SIZE", "process_count", "world_size"])
def test_several_processes_are_refused(runtime: Any, asked: str) -> None:
    env = {"WORLD_SIZE": "2"} if asked == "WORLD_SIZE" else {}
    if not env:
        setattr(runtime, asked, lambda: 2)
    with pytest.raises(RuntimeError, match=r"there are 2 processes.*SPMD.*start the script once"):
        xla_device(env)


def test_a_runtime_without_a_device_says_what_to_do(runtime: Any) -> None:
    def absent() -> int:
        raise RuntimeError("No accelerator device found")

    runtime.global_runtime_device_count = absent
    with pytest.raises(RuntimeError, match=r"PJRT_DEVICE=TPU\), which fails: No acc.*cpu=True"):
        xla_device({"PJRT_DEVICE": "TPU"})
