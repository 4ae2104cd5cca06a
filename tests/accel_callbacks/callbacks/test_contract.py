"""Every public callback keeps the contract; the tests are generated from a table of factories."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch

from accel_callbacks import callbacks
from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.callbacks.dispatch.registration import overrides
from accel_callbacks.distributed.topology import destroy_topology
from tests.accel_callbacks.callbacks.factories import CASES, MEMORY
from tests.support import energy
from tests.support.contract import Check, callback_checks

# Of another callback that fails beside it.
BESIDE = ("error_before", "error_after")


def checks() -> Iterator[Any]:
    """Yield all checks of all cases, but for those of the slow tests below.

    What is about the library alone is checked with a callback that does nothing.
    """
    for name, case in CASES.items():
        for check in callback_checks(case.make, allow_sync=case.allow_sync):
            late = case.slow or check.name in BESIDE
            if not late and (check.name == "on_error") == (name == "Callback"):
                yield pytest.param(check, id=f"{name}-{check}")


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    """What a Checkpoint has written does not stay."""
    yield
    clear_memory()


def clear_memory() -> None:
    store = fsspec.filesystem("memory")
    if store.exists(MEMORY):
        store.rm(MEMORY, recursive=True)


@pytest.fixture(autouse=True)
def sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read no sensors of this machine, and need no codecarbon."""
    energy.stand_in(monkeypatch)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the test below is for a GPU")
@pytest.mark.parametrize("check", list(checks()))
def test_contract(check: Check) -> None:
    check()


def failures(beside: bool) -> dict[str, str]:
    """Return the errors of slow cases, or of the others beside a callback that fails."""
    found = {}
    for name, case in CASES.items():
        for check in callback_checks(case.make, allow_sync=case.allow_sync):
            if case.slow == beside or (check.name in BESIDE) != beside:
                continue
            clear_memory()
            try:
                check()
            except Exception as error:
                found[f"{name}-{check}"] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="a test below is for a GPU")
@pytest.mark.parametrize("beside", [False, True], ids=["other settings", "another that fails"])
def test_contract_of_more(beside: bool) -> None:
    assert failures(beside) == {}


def test_no_callback_is_forgotten() -> None:
    """Whatever is public and has hooks is in the table, by its class."""
    public = [getattr(callbacks, name) for name in callbacks.__all__]
    kinds = {
        one
        for one in public
        if inspect.isclass(one) and (one is callbacks.Callback or _has_hooks(one))
    }
    made = {type(_first(case.make())) for case in CASES.values() if not case.slow}
    assert kinds - made == set()


def _has_hooks(kind: type) -> bool:
    return any(callable(getattr(kind, hook, None)) for hook in HOOKS)


def _first(made: Any) -> Any:
    return made[0] if isinstance(made, list) else made


def test_each_case_has_something_to_check() -> None:
    for name, case in CASES.items():
        callback = _first(case.make())
        assert name == "Callback" or any(overrides(callback, hook) for hook in HOOKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", sorted(CASES))
def test_nothing_waits_for_the_gpu(name: str) -> None:
    case = CASES[name]
    allowed = () if name == "NonFinite" else case.allow_sync
    destroy_topology()
    (check,) = (
        check
        for check in callback_checks(case.make, allow_sync=allowed, cpu=False)
        if check.name == "host_sync"
    )
    check()
