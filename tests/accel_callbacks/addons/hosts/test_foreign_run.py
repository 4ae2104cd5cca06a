"""The run over another library's trainer follows the trainer at each access."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from accel_callbacks import Callback
from accel_callbacks.addons.hosts.foreign_trainer import HostedCallback
from accel_callbacks.addons.hosts.host import ForeignHost
from accel_callbacks.callbacks.adapters import NotInAPlainLoop


class FakeHost(ForeignHost):
    """A trainer whose attributes are a dict."""

    title = "FakeTrainer"
    device = torch.device("cpu")
    bare_models: ClassVar[list[torch.nn.Module]] = []
    optimizers: ClassVar[list[torch.optim.Optimizer]] = []
    schedulers: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.known: dict[str, Any] = {"global_step": 3, "current_epoch": 1, "resumed_from": None}
        self.logged: dict[str, Any] = {}
        self.reads = 0

    def get(self, name: str) -> Any:
        return self.known[name]

    def metrics(self) -> dict[str, Any]:
        self.reads += 1
        return self.logged

    def write(self, values: dict[str, Any], step: int) -> None:
        """Nothing to write to."""

    def stop(self, reason: str) -> None:
        self.known["stopped"] = reason

    def accumulate(self, batches: int) -> None:
        self.known["accumulate_grad_batches"] = batches


class Logs(Callback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_train_epoch_start(self, run: Any, model: Any) -> None:
        run.accelerator.log({"lr": 0.5})

    def on_log(self, run: Any, model: Any, metrics: Any, step: int) -> None:
        self.calls.append((metrics, step))

    def on_after_optimizer_step(self, run: Any, model: Any, optimizer: Any) -> None:
        self.calls.append(run.global_step)


@pytest.fixture
def hosted() -> HostedCallback:
    return HostedCallback(Logs(), FakeHost(), never=())


def test_position_and_metrics_are_the_trainers_between_hooks(hosted: HostedCallback) -> None:
    run, host = hosted.run, hosted.host
    assert (run.global_step, run.current_epoch, run.epochs_done) == (3, 1, 1)
    host.known.update(global_step=4, current_epoch=2)  # type: ignore[attr-defined]
    host.metrics()["loss"] = 0.25
    assert (run.global_step, run.epochs_done) == (4, 2)
    assert run.callback_metrics == {"loss": 0.25}


def test_metrics_are_not_read_for_a_hook(hosted: HostedCallback) -> None:
    # In Lightning, reading them computes torchmetrics and may synchronize ranks.
    hosted.begin_evaluation()
    hosted.stepped(4, None)
    assert hosted.callback.calls == [4]
    assert hosted.host.reads == 0  # type: ignore[attr-defined]


def test_what_the_callback_logs_comes_to_its_on_log(hosted: HostedCallback) -> None:
    hosted.begin_epoch()
    assert hosted.callback.calls == [({"lr": 0.5}, 3)]
    assert hosted.run.callback_metrics == {"lr": 0.5}


def test_evaluations_are_counted_by_the_run(hosted: HostedCallback) -> None:
    assert not hosted.run.evaluating
    hosted.begin_evaluation()
    assert hosted.run.evaluating
    hosted.end_evaluation()
    assert not hosted.run.evaluating


def test_a_second_training_keeps_the_id(hosted: HostedCallback) -> None:
    run = hosted.run
    before = run.run_id
    run.batch_idx, run.epoch_open = 5, True
    run.stop("enough")
    assert (run.stop_reason, hosted.host.get("stopped")) == ("enough", "enough")
    run.begin()
    assert (run.run_id, run.batch_idx, run.epoch_open) == (before, -1, False)
    assert run.stop_reason is None


@pytest.mark.parametrize("name", ["max_steps", "state_dict", "unheard_of"])
def test_what_the_trainer_lacks_is_named(hosted: HostedCallback, name: str) -> None:
    with pytest.raises(NotInAPlainLoop, match=f"^Logs needs run.{name}, which only accel.run has$"):
        getattr(hosted.run, name)


@pytest.mark.parametrize("name", ["global_step", "current_epoch", "callback_metrics"])
def test_the_position_cannot_be_set(hosted: HostedCallback, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(hosted.run, name, 7)
