"""Budgets: in one order, from the user or from the machine."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_callbacks.models.offload import budgets
from accel_callbacks.models.offload.budgets import budgets_of, get_max_memory, host_memory


def test_devices_are_in_the_order_in_which_they_are_filled() -> None:
    given: dict[Any, Any] = {"disk": 1, "cpu": "2GB", "cuda:1": 3, 10: 4, 2: 5.9, "cuda:0": None}
    found = budgets_of(given)
    wanted = {2: 5, 10: 4, "cuda:0": None, "cuda:1": 3, "cpu": 2 * 10**9, "disk": 1}
    assert list(found.items()) == list(wanted.items())
    assert list(budgets_of(dict(reversed(given.items())))) == list(wanted)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"gpu0": 1}, "'gpu0'"),
        ({"dsik": 1}, "Did you mean 'disk'"),
        ({"meta": 1}, "'meta'"),
        ({"cpu:0": 1}, "'cpu:0'"),
        ({0: "much"}, "budget of 0"),
        ({True: 1}, "True"),
    ],
)
def test_what_is_no_budget_is_named(given: dict[Any, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        get_max_memory(given)


def test_given_budgets_are_returned_as_numbers() -> None:
    given: dict[Any, Any] = {"cpu": "1GiB", 0: "2GB"}
    assert list(get_max_memory(given).items()) == [(0, 2 * 10**9), ("cpu", 1 << 30)]
    assert given == {"cpu": "1GiB", 0: "2GB"}


class Machine:
    """What torch says of two accelerators, the second of which may not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str = "cuda") -> None:
        self.busy = False
        self.integrated = False
        accelerator = torch.accelerator
        monkeypatch.setattr(accelerator, "is_available", lambda: True)
        monkeypatch.setattr(accelerator, "device_count", lambda: 2)
        monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch, "get_device_module", lambda device: torch.cuda)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.mem_get_info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 30)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 10)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda index: SimpleNamespace(is_integrated=self.integrated),
        )
        monkeypatch.setattr(budgets, "host_memory", lambda: 1000)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        if index == 1 and self.busy:
            raise RuntimeError("device is busy")
        return 100, 500


def test_what_the_allocator_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    assert get_max_memory() == {0: 120, 1: 120, "cpu": 1000}


def test_a_device_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch).busy = True
    assert get_max_memory() == {0: 120, "cpu": 1000}


def test_memory_that_is_shared_with_the_host_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.integrated = True
    assert get_max_memory() == {0: 120, 1: 120}
    Machine(monkeypatch, "mps")
    assert get_max_memory() == {"mps": 1000}


def test_a_device_that_is_not_here_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_max_memory({5: 1})  # no accelerator at all: the plan is for another machine
    Machine(monkeypatch)
    with pytest.warns(UserWarning, match="budget for 5, and the accelerators here are 0, 1"):
        get_max_memory({5: 1, 0: 1})


def test_the_hosts_memory_is_what_is_available() -> None:
    assert 0 < host_memory() < 1 << 50
    assert get_max_memory()["cpu"] > 0
