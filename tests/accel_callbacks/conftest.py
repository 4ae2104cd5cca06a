"""Small real runs to look at, a callback that writes down every hook, and a guard against leaks."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.distributed.topology import destroy_topology

_PER_BACKWARD = ("on_before_backward", "on_after_backward")
_PER_STEP = ("on_before_optimizer_step", "on_after_optimizer_step", "on_before_zero_grad")


def _environment() -> dict[str, str]:
    """The variables of this process, without those that pytest and torch themselves set."""
    foreign = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Iterator[None]:
    """No test may change the environment, leave a thread running, or stay in a process group."""
    environment, threads = _environment(), set(threading.enumerate())
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    yield
    destroy_topology()
    left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    for thread in left:  # one that gives leases back, of what was collected, ends by itself
        thread.join()
    left = [thread for thread in left if thread.is_alive()]
    assert _environment() == environment, "the test changed os.environ"
    assert not left, f"the test left threads running: {left}"
    assert not dist.is_initialized(), "the test left a process group"


def _tell(hook: str, run: Any, args: tuple[Any, ...]) -> str:
    """One line for a call: the hook without its ``on_``, and what tells this call from others."""
    facts: dict[str, Callable[[], tuple[Any, ...]]] = {
        "setup": lambda: args,
        "teardown": lambda: args,
        "on_train_epoch_start": lambda: (run.current_epoch,),
        "on_train_epoch_end": lambda: (run.current_epoch,),
        "on_train_batch_start": lambda: args[1:],
        "on_train_batch_end": lambda: args[2:],
        "on_validation_batch_start": lambda: args[1:],
        "on_validation_batch_end": lambda: args[2:],
        "on_test_batch_start": lambda: args[1:],
        "on_test_batch_end": lambda: args[2:],
        "on_preempt": lambda: args,
        "on_after_optimizer_step": lambda: (run.global_step,),
        "on_log": lambda: (*args[0], args[1]),
        "on_exception": lambda: (type(args[0]).__name__,),
    }
    known = facts.get(hook)
    return " ".join([hook.removeprefix("on_"), *(map(str, known()) if known else ())])


class Recorder(Callback):
    """Writes down each hook in the order of the calls."""

    def __init__(self, name: str = "recorder", skip: tuple[str, ...] = ()) -> None:
        self.name = name
        self.trace: list[str] = []
        for hook in HOOKS:
            if hook not in skip:
                setattr(self, hook, self._writer(hook))

    @property
    def state_key(self) -> str:
        return self.name

    def _writer(self, hook: str) -> Callable[..., None]:
        return lambda run, model, *args: self.trace.append(_tell(hook, run, args))

    def take(self) -> list[str]:
        """What was written since the last call."""
        taken, self.trace[:] = list(self.trace), []
        return taken


@dataclass
class Training:
    """An Accelerator with all that a small training needs."""

    accel: Accelerator
    recorder: Recorder
    model: Any
    optimizer: Any
    train: Any
    val: Any

    def step(self, batch: torch.Tensor) -> None:
        """One optimizer step on one batch."""
        self.accel.backward(self.model(batch).mean())
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def recorder() -> Callable[..., Recorder]:
    """Makes a callback that writes down each hook."""
    return Recorder


@pytest.fixture
def training() -> Callable[..., Training]:
    """Makes a training of two batches an epoch that notes epochs, batches and what surrounds them.

    ``full`` notes the hooks of backward and of the optimizer step too.
    """

    def make(
        *callbacks: Any,
        batches: int = 2,
        val_batches: int = 1,
        full: bool = False,
        workers: int = 0,
        **options: Any,
    ) -> Training:
        recorder = Recorder(skip=() if full else (*_PER_BACKWARD, *_PER_STEP))
        accel = Accelerator(cpu=True, callbacks=[recorder, *callbacks], **options)
        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1)
        data = torch.arange(2.0 * batches).reshape(-1, 1)
        parts = accel.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.utils.data.DataLoader(data, 2, shuffle=True, num_workers=workers),
            torch.utils.data.DataLoader(data[: 2 * val_batches], 2),
        )
        return Training(accel, recorder, *parts)

    return make
