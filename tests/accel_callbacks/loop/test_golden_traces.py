"""Golden traces: a whole run of each kind, every hook written down by one recorder."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, configured
from accel_callbacks.callbacks.base import HOOKS

BACKWARD = "before_backward|after_backward"
STEPS = "before_optimizer_step|after_optimizer_step {}|before_zero_grad"


def lines(text: str) -> list[str]:
    """A trace as it is written here: hooks in lines, several with ``|`` between them."""
    return [hook.strip() for hook in text.replace("\n", "|").split("|") if hook.strip()]


def step(batch: int, number: int) -> str:
    """One batch that takes an optimizer step."""
    inside = f"{BACKWARD}|{STEPS.format(number)}"
    return f"train_batch_start {batch}|{inside}|train_batch_end {batch}"


def test_a_plain_loop(training):
    t = training(full=True)
    for _ in range(2):
        t.model.train()
        for batch in t.train:
            t.step(batch)
        t.model.eval()
        for batch in t.val:
            t.model(batch)
    t.accel.end_training()
    validation = """
        validation_start | validation_epoch_start
        validation_batch_start 0 | validation_batch_end 0
        validation_epoch_end | validation_end
    """
    assert t.recorder.trace == lines(f"""
        setup fit | fit_start | train_start
        train_epoch_start 0 | {step(0, 1)} | {step(1, 2)} | train_epoch_end 0
        {validation}
        train_epoch_start 1 | {step(0, 3)} | {step(1, 4)} | train_epoch_end 1
        {validation}
        train_end | fit_end | teardown fit
    """)


def test_a_run_with_accumulate_an_evaluation_and_a_checkpoint(training, tmp_path):
    saver = Checkpoint(tmp_path / "c", every_n_epochs=1, async_save=False)
    t = training(saver, batches=3, full=True, gradient_accumulation_steps=2)
    with t.accel.run("golden") as run:
        for _ in run.epochs(1):
            for batch in t.train:
                with t.accel.accumulate(t.model):
                    t.step(batch)
                t.accel.log({"train/loss": 1.0})
            with t.accel.evaluate(t.model):
                for batch in t.val:
                    t.model(batch)
            t.accel.log({"val/loss": 0.5})
    assert t.recorder.trace == lines(f"""
        setup fit | fit_start | train_start | train_epoch_start 0
        train_batch_start 0 | {BACKWARD} | log train/loss 0 | train_batch_end 0
        train_batch_start 1 | {BACKWARD} | {STEPS.format(1)} | log train/loss 1 | train_batch_end 1
        train_batch_start 2 | {BACKWARD} | {STEPS.format(2)} | log train/loss 2 | train_batch_end 2
        validation_start | validation_epoch_start
        validation_batch_start 0 | validation_batch_end 0
        validation_epoch_end | validation_end
        log val/loss 2
        train_epoch_end 0 | save_checkpoint | checkpoint_saved
        train_end | fit_end | teardown fit
    """)


def test_several_loaders(training):
    t = training(batches=1, full=True)
    other, unlabelled, second = t.accel.prepare(
        DataLoader(range(1)), DataLoader(range(2)), DataLoader(range(1))
    )
    with t.accel.run("golden") as run:
        for _ in run.epochs(1):
            for batch in t.train:
                list(unlabelled)  # data inside of a training loop
                t.step(batch)
            list(other)  # a second pass of the same epoch
            with t.accel.evaluate(t.model):
                list(t.val)
                list(second)
    assert t.recorder.trace == lines(f"""
        setup fit | fit_start | train_start | train_epoch_start 0
        {step(0, 1)}
        train_batch_start 0 | train_batch_end 0
        validation_start | validation_epoch_start
        validation_batch_start 0 | validation_batch_end 0
        validation_batch_start 0 1 | validation_batch_end 0 1
        validation_epoch_end | validation_end
        train_epoch_end 0 | train_end | fit_end | teardown fit
    """)


def test_a_test_stage_alone_and_after_training(training):
    t = training(batches=1, full=True)
    with t.accel.run("golden") as run:
        for _ in run.epochs(1):
            for batch in t.train:
                t.step(batch)
                with t.accel.evaluate(t.model, stage="test"):
                    list(t.val)
                    list(t.val)
        with t.accel.evaluate(stage="test"):
            for _ in t.val:
                with t.accel.evaluate():
                    list(t.val)
                break
    test = "test_start | test_epoch_start | {} | test_epoch_end | test_end"
    twice = "test_batch_start 0 | test_batch_end 0 | test_batch_start 0 1 | test_batch_end 0 1"
    nested = """
        validation_start | validation_epoch_start
        validation_batch_start 0 | validation_batch_end 0
        validation_epoch_end | validation_end
    """
    assert t.recorder.trace == lines(f"""
        setup fit | fit_start | train_start | train_epoch_start 0
        train_batch_start 0 | {BACKWARD} | {STEPS.format(1)} | {test.format(twice)}
        train_batch_end 0 | train_epoch_end 0
        {test.format("test_batch_start 0 |" + nested)}
        train_end | fit_end | teardown fit
    """)


def test_a_break(training):
    t = training(batches=3, full=True)
    with t.accel.run("golden") as run:
        for _ in run.epochs(2):
            for batch in t.train:
                t.step(batch)
                break
    assert t.recorder.trace == lines(f"""
        setup fit | fit_start | train_start
        train_epoch_start 0 | {step(0, 1)} | train_epoch_end 0
        train_epoch_start 1 | {step(0, 2)} | train_epoch_end 1
        train_end | fit_end | teardown fit
    """)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_and_another_run_after_it(training, error):
    t = training(full=True, gradient_accumulation_steps=2)

    def fail() -> None:
        with t.accel.run("golden") as run:
            for _ in run.epochs(1):
                for batch in t.train:
                    with t.accel.accumulate(t.model), t.accel.evaluate(stage="test"):
                        t.model(batch)
                        raise error

    with pytest.raises(error):
        fail()
    assert t.recorder.take() == lines(f"""
        setup fit | fit_start | train_start | train_epoch_start 0 | train_batch_start 0
        test_start | test_epoch_start
        exception {error.__name__} | teardown fit
    """)
    assert t.accel.current_run.interrupted == (error is KeyboardInterrupt)
    with t.accel.run("golden") as run:
        for _ in run.epochs(1):
            for batch in t.train:
                t.step(batch)
    assert t.recorder.take()[:4] == lines(
        "setup fit | fit_start | train_start | train_epoch_start 0"
    )
    assert not run.interrupted


def test_a_resume_in_the_middle_of_an_epoch(training, tmp_path):
    t = training(batches=3)
    with t.accel.run("golden") as run:
        for _ in run.epochs(2):
            for batch in t.train:
                t.step(batch)
                if run.global_step == 2:
                    t.accel.save_state(tmp_path / "c")
                    break
            break
    resumed = training(batches=3, full=True)
    with resumed.accel.run("golden", resume=str(tmp_path / "c")) as run:
        for _ in run.epochs(2):
            for batch in resumed.train:
                resumed.step(batch)
    assert resumed.recorder.trace == lines(f"""
        setup fit | load_checkpoint | fit_start | train_start
        {step(2, 3)} | train_epoch_end 0
        train_epoch_start 1 | {step(0, 4)} | {step(1, 5)} | {step(2, 6)} | train_epoch_end 1
        train_end | fit_end | teardown fit
    """)


def test_a_preemption(training):
    t = training(batches=3, full=True)

    def script() -> None:
        with t.accel.run("golden") as run:
            run.exit_code = 85
            for _ in run.epochs(2):
                for batch in t.train:
                    t.step(batch)
                    if run.global_step == 2:
                        run.preempt("SIGTERM")

    with pytest.raises(SystemExit) as ended:
        script()
    assert ended.value.code == 85
    assert t.recorder.trace == lines(f"""
        setup fit | fit_start | train_start | train_epoch_start 0
        {step(0, 1)} | {step(1, 2)} | preempt SIGTERM
        train_epoch_end 0 | train_end | fit_end | teardown fit
    """)


class Says(Callback):
    """Tells a shared list of each hook."""

    def __init__(self, name: str, calls: list[str], **options: object) -> None:
        self.name = name
        vars(self).update(options)
        for hook in HOOKS:
            text = f"{name} {hook.removeprefix('on_')}"
            setattr(self, hook, lambda *args, text=text: calls.append(text))

    @property
    def state_key(self) -> str:
        return self.name


def test_callbacks_in_the_order_that_before_and_after_ask_for(tmp_path: Path):
    calls: list[str] = []
    late = Says("late", calls, runs_last=True)
    a, b, c = Says("a", calls), Says("b", calls), Says("c", calls)
    accel = Accelerator(
        cpu=True,
        callbacks=[late, configured(a, after="c"), configured(b, before=a), c],
    )
    loader = accel.prepare(DataLoader(range(1)))
    with accel.run("golden"):
        list(loader)
    entering = ["setup", "fit_start", "train_start", "train_epoch_start"]
    within = ["train_batch_start", "train_batch_end", "train_epoch_end"]
    leaving = ["train_end", "fit_end", "teardown"]
    forth, back = ["b", "c", "a", "late"], ["a", "c", "b", "late"]
    assert calls == [
        *(f"{name} {hook}" for hook in (*entering, *within) for name in forth),
        *(f"{name} {hook}" for hook in leaving for name in back),
    ]
