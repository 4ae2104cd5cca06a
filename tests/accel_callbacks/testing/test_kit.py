"""The test kit: it finds what it is for, and lets through what is right."""

from __future__ import annotations

import random
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_callbacks.testing as kit
from accel_callbacks import Callback
from accel_callbacks.callbacks import EMA, EarlyStopping, LearningRateMonitor
from accel_callbacks.testing import check_callback, fire, record, tiny_training
from tests.support.contract import callback_checks, host_syncs

ROOT = Path(__file__).resolve().parents[3]


class Counts(Callback):
    """Right in all respects."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.total = torch.zeros(())

    def setup(self, run, model, stage):
        if run.resumed_from is None:
            self.total = torch.zeros(())

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.total = self.total + outputs["loss"]

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state_dict):
        self.total = state_dict["total"]


# --- callbacks that are wrong, each in one way -----------------------------------------------


class WrongArguments(Callback):
    def on_validation_batch_end(self, run, model, outputs, batch, batch_idx):
        pass


class FailsWithoutBackward(Callback):
    def on_preempt(self, run, model, reason):
        raise ValueError("not written yet")


class NeedsAllBatches(Callback):
    def on_train_epoch_end(self, run, model):
        if run.batch_idx + 1 != run.num_training_batches:
            raise ValueError("some are missing")


class OneStepABatch(Callback):
    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        if run.global_step != 3 * run.current_epoch + batch_idx + 1:
            raise ValueError("no step")


class Reads(Callback):
    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.last = float(outputs["loss"])


class ReadsLogs(Callback):
    def on_log(self, run, model, metrics, step):
        self.last = model[0].weight.norm().item()


class DislikesOthers(Callback):
    def on_log(self, run, model, metrics, step):
        if "lr-SGD" in metrics:
            raise ValueError("what is this?")


class NeverReset(Counts):
    def setup(self, run, model, stage):
        pass


class OnTheClass(Callback):
    steps: list[int] = []  # noqa: RUF012 - that is what is wrong

    def on_after_optimizer_step(self, run, model, optimizer):
        self.steps.append(run.global_step)

    def state_dict(self):
        return {"steps": list(self.steps)}

    def load_state_dict(self, state_dict):
        self.steps[:] = state_dict["steps"]


class StrangeState(Counts):
    def state_dict(self):
        return {"total": {1: self.total}}


class ObjectInState(Counts):
    def state_dict(self):
        return {"total": {1, 2}}


class ForgetsToLoad(Counts):
    def load_state_dict(self, state_dict):
        pass


class CountsSinceStart(Counts):
    """Begins anew in each process, but for what it has loaded: the epoch's losses are lost."""

    def on_train_start(self, run, model):
        self.total = torch.zeros(())


class SteersByItself(Callback):
    """Trains otherwise after a resume, and has no state."""

    def setup(self, run, model, stage):
        self.seen = 0

    def on_before_optimizer_step(self, run, model, optimizer):
        self.seen += 1
        for parameter in model.parameters():
            parameter.grad *= self.seen


class LeavesThread(Callback):
    def setup(self, run, model, stage):
        self.end = threading.Event()
        threading.Thread(target=self.end.wait, args=(20,), daemon=True, name="left").start()

    def on_train_end(self, run, model):
        self.end.set()


class LeavesHandler(Callback):
    def setup(self, run, model, stage):
        self.before = signal.signal(signal.SIGUSR2, lambda *_: None)

    def on_train_end(self, run, model):
        signal.signal(signal.SIGUSR2, self.before)


class LeavesHook(Callback):
    def on_train_start(self, run, model):
        self.handle = model.register_forward_hook(lambda *_: None)

    def on_train_end(self, run, model):
        self.handle.remove()


class LeavesEvalMode(Callback):
    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        model[0].eval()

    def on_train_end(self, run, model):
        model[0].train()


class LeavesGradientsOff(Callback):
    def on_exception(self, run, model, exception):
        torch.set_grad_enabled(False)


class SwapsWeights(Callback):
    """Evaluates with weights of zero, and relies on the end of the evaluation."""

    def on_validation_start(self, run, model):
        self.kept = {name: weight.clone() for name, weight in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data.zero_()

    def on_validation_end(self, run, model):
        model.load_state_dict(self.kept)


class FailsToTidyUp(Callback):
    def on_train_start(self, run, model):
        self.file = "open"

    def teardown(self, run, model, stage):
        len(self.file)
        del self.file


WRONG: dict[str, list[tuple[Callable[[], Any], str]]] = {
    "arguments": [(WrongArguments, "outputs, batch, batch_idx, dataloader_idx")],
    "whole_runs": [(FailsWithoutBackward, "not written yet")],
    "window": [(OneStepABatch, "no step")],
    "break": [(NeedsAllBatches, "some are missing")],
    "host_sync": [
        (Reads, r'on_train_batch_end: Tensor.__float__ at .*kit.py:\d+: self.last = fl'),
        (ReadsLogs, r"on_log: Tensor.item .*\n.* allow_sync=\('on_log',\)"),
    ],
    "order": [(DislikesOthers, "what is this")],
    "second_run": [
        (NeverReset, "does not reset its state in a second run.*total: "),
        (OnTheClass, "two equal runs.*on the class"),
    ],
    "state": [
        (StrangeState, r"a key of state_dict\(\)\['total'\] is 1\."),
        (ObjectInState, r"state_dict\(\)\['total'\] is a set\."),
        (ForgetsToLoad, "is not restored by a resume.* used one"),
    ],
    "resume": [
        (CountsSinceStart, "Interrupted at step 1, batch 0, .*total"),
        (SteersByItself, "Interrupted at step 1, .*weight 0.weight"),
    ],
    "error_before": [(FailsToTidyUp, "neighbor before it raised in setup, its own hook failed")],
    "error_after": [
        (LeavesThread, "raised in setup, the thread 'left' is still running"),
        (LeavesHandler, "the handler of SIGUSR2"),
        (LeavesHook, "hooks instead of"),
        (LeavesEvalMode, "the module '0' is in eval mode"),
        (SwapsWeights, "raised in on_validation_start, weight 0.weight"),
    ],
    "error_in_loop": [
        (LeavesGradientsOff, "gradients: False instead of True"),
        (SwapsWeights, "loop raised Injected in its validation part, weight 0.weight"),
    ],
}  # fmt: skip


@pytest.fixture
def as_before():
    """What the wrong ones leave behind."""
    handler = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, handler)
    torch.set_grad_enabled(True)


def check_of(name: str, factory: Callable[[], Any], **options: Any) -> kit.Check:
    """One of the checks of a callback."""
    return next(one for one in callback_checks(factory, **options) if one.name == name)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("name", "factory", "told"),
    [pytest.param(n, f, t, id=f"{n}-{f.__name__}") for n, ones in WRONG.items() for f, t in ones],
)
def test_what_is_wrong_is_found_and_said(name, factory, told):
    with pytest.raises((AssertionError, ValueError)) as caught:
        check_of(name, factory)()
    assert re.search(told, str(caught.value), re.S), str(caught.value)


def test_each_check_can_fail():
    names = {check.name for check in callback_checks(Counts)}
    assert names - set(WRONG) == {"on_error"}  # which is about the library


def test_what_is_right_passes_and_leaves_the_random_numbers_alone():
    random.seed(3)
    torch.manual_seed(3)
    expected = random.Random(3).random(), torch.rand(1, generator=torch.manual_seed(3))
    torch.manual_seed(3)
    check_callback(Counts)
    assert (random.random(), torch.rand(1)) == expected


def test_the_factory_must_make_a_new_one():
    one = Counts()
    with pytest.raises(AssertionError, match="the same callback twice"):
        check_of("second_run", lambda: one)()


def test_what_waits_may_be_allowed():
    check_of("host_sync", Reads, allow_sync=["train_batch_end"])()


def test_options_go_to_the_training_and_wrong_names_are_refused():
    class NeedsNorm(Callback):
        def setup(self, run, model, stage):
            assert model.kind == "mine"

    def mine():
        model = torch.nn.Linear(2, 1)
        model.kind = "mine"
        return model

    check_of("break", NeedsNorm, model=mine)()
    with pytest.raises(ValueError, match=r"'resum' is no check\. Did you mean 'resume'"):
        kit.callback_checks(Counts, skip=["resum"])
    with pytest.raises(ValueError, match="is no hook"):
        callback_checks(Counts, allow_sync=["train_batch_stop"])


def test_companions_come_along():
    class Follows(Callback):
        def setup(self, run, model, stage):
            assert any(isinstance(one, EMA) for one in run.callbacks)

    check_of("order", lambda: [Follows(), EMA()])()


# --- the smaller tools -------------------------------------------------------------------------


def test_a_tiny_training_says_what_happened():
    done = tiny_training([EMA(0.5)], epochs=1, batches=3, window=2, test=True)
    assert (done.run.global_step, done.run.epochs_done) == (2, 1)
    assert done.trace[:4] == ["setup fit", "fit_start", "train_start", "train_epoch_start 0"]
    done.recorder.assert_order("validation_start", "log val/loss 2", "test_batch_end 1", "teardown")
    with pytest.raises(AssertionError, match="'train_batch_start 0' did not come after 'train_end"):
        done.recorder.assert_order("train_end", "train_batch_start 0")
    folder = Path(done.folder)
    assert folder.is_dir()


def test_it_can_be_played_again_and_is_the_same():
    training = tiny_training(epochs=1)
    first = {name: weight.clone() for name, weight in training.model.state_dict().items()}
    trace = list(training.trace)
    training.begin_again().play()
    assert training.trace == trace
    assert all(weight.equal(first[n]) for n, weight in training.model.state_dict().items())


def test_a_recorder_of_some_hooks():
    recorder = record("validation_end", "on_train_epoch_end")
    tiny_training([recorder], epochs=1)
    assert recorder.take() == ["validation_end", "train_epoch_end 0"]
    assert recorder.take() == []
    with pytest.raises(ValueError, match="no hook"):
        record("validation_stop")


def test_one_hook_by_hand():
    stopper = EarlyStopping("val/loss", patience=1)
    run = fire(stopper, "on_log", metrics={"val/loss": torch.tensor(1.0)})
    run.global_step = 7
    assert not fire(stopper, "log", run=run).should_stop
    assert fire(stopper, "log", run=run, metrics={"val/loss": torch.tensor(2.0)}).should_stop
    run = fire(LearningRateMonitor(), "after_optimizer_step", run=run)
    assert run.callback_metrics == {"lr-SGD": 0.1}


@pytest.mark.parametrize(
    ("hook", "arguments", "error", "told"),
    [
        ("train_batch_stop", {}, ValueError, "is no hook"),
        ("on_train_end", {}, ValueError, "Counts has no on_train_end"),
        ("train_batch_end", {"bach": 1}, TypeError, "no 'bach'.*Did you mean 'batch'"),
    ],
)
def test_a_wrong_hook_or_argument_is_refused(hook, arguments, error, told):
    with pytest.raises(error, match=told):
        fire(Counts(), hook, **arguments)


@pytest.mark.parametrize(
    "waits",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.sum() > 0),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: t.to("cpu"),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.where(t > 0),
        lambda t: f"{t.sum():.2f}",
        lambda t: 1.0 in t,
        lambda t: max(t),
        lambda t: t[t.sum().long() :],
        lambda t: torch.unique(t),
    ],
)
def test_each_way_to_wait_is_found(waits):
    tensor = torch.ones(3)
    with host_syncs() as found:
        waits(tensor)
    assert found
    assert found[0].where.startswith(__file__)


def test_what_stays_on_the_device_is_no_wait():
    tensor = torch.ones(3, requires_grad=True)
    with host_syncs() as found:
        (tensor * 2).sum().backward()
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([tensor.grad])))
        torch.where(tensor > 0, tensor, 0.0).clamp_(max=total.detach())
        tensor.to(torch.float64, non_blocking=True)
        tensor[torch.tensor([0])]
    assert found == []


def test_synchronize_is_found_and_put_back(monkeypatch):
    called = []

    def without_a_device():
        called.append(1)

    monkeypatch.setattr(torch.accelerator, "synchronize", without_a_device)
    with host_syncs() as found:
        torch.accelerator.synchronize()
    assert [one.what.rpartition(".")[2] for one in found] == ["synchronize"]
    assert called == [1]
    assert torch.accelerator.synchronize is without_a_device


@pytest.mark.parametrize("name", kit.__all__)
def test_each_name_is_in_the_reference(name):
    page = (ROOT / "docs" / "reference" / "testing.md").read_text()
    assert re.search(rf"`{name}\b", page)
