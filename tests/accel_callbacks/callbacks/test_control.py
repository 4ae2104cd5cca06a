"""Control on one process: what a command does, at which step, and what the journal says of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.addons.journal.state import state_of
from accel_callbacks.addons.steering.commands import send_command
from accel_callbacks.callbacks import Checkpoint, Control, GradientNorm, Throughput
from accel_callbacks.callbacks import control as module
from accel_callbacks.journal import Journal

STEPS = 6


@pytest.fixture(autouse=True)
def look_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY", 0.0)


class Sends(Callback):
    """Sends commands at the ends of steps, as `accel ctl` does from another process."""

    before = Control

    def __init__(self, **commands: str) -> None:
        self.commands = {int(name[1:]): command for name, command in commands.items()}
        self.folder = ""

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.folder = f"{run.default_root_dir}/journal/{run.run_id}"
        for command in filter(None, self.commands.get(run.global_step, "").split("; ")):
            assert send_command(run.default_root_dir, command) == run.run_id


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: " ".join(capsys.readouterr().err.split())


def train(
    folder: Path, *callbacks: Any, epochs: int = 1, schedule: bool = False, groups: int = 1
) -> Any:
    torch.manual_seed(0)
    accel = Accelerator(cpu=True, project_dir=folder, callbacks=callbacks)
    model = torch.nn.Linear(2, 1)
    parameters = [{"params": [p], "lr": 0.1 / n} for n, p in enumerate(model.parameters(), 1)]
    if groups == 1:
        parameters = [{"params": list(model.parameters()), "lr": 0.1}]
    optimizer = torch.optim.SGD(parameters)
    data = torch.utils.data.DataLoader(torch.randn(STEPS, 2), shuffle=True)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    scheduler = None
    if schedule:
        halves = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
        scheduler = accel.prepare(halves)
    with accel.run("steered") as run:
        for _ in run.epochs(epochs):
            for batch in data:
                accel.backward(model(batch).square().mean())
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
    return run


def rates(folder: Path) -> list[float]:
    return Journal.read(folder).rows()["learning_rate"].tolist()


def marks(folder: Path, kind: str = "control") -> list[dict[str, Any]]:
    return [mark for mark in Journal.read(folder).marks if mark["kind"] == kind]


def test_a_rate_is_set_after_the_step_and_marked(tmp_path: Path, log: Callable[[], str]) -> None:
    sends = Sends(s2="set lr=0.01")
    train(tmp_path, Control(), sends)
    assert rates(tmp_path) == [0.1] * 2 + [0.01] * 4
    (mark,) = marks(tmp_path)
    assert (mark["step"], mark["command"], mark["number"]) == (2, "set lr=0.01", 1)
    assert "set lr=0.01, which was 0.1 (after step 2)" in log()
    assert not (Path(sends.folder) / "commands").exists()


def test_a_schedule_goes_on_from_the_rate_and_other_groups_follow(tmp_path: Path) -> None:
    run = train(tmp_path, Control(), Sends(s2="set lr=0.1"), schedule=True, groups=2)
    assert rates(tmp_path) == pytest.approx([0.1, 0.05, 0.1, 0.05, 0.025, 0.0125])
    first, second = run.optimizers[0].param_groups
    assert second["lr"] == pytest.approx(first["lr"] / 2)


def test_an_evaluation_is_the_users_function_and_changes_no_draw(
    tmp_path: Path, log: Callable[[], str]
) -> None:
    seen: list[tuple[int, bool]] = []

    def evaluate(run: Any) -> None:
        with run.accelerator.evaluate(run.model):
            seen.append((run.global_step, run.model.training))
            torch.rand(3)

    train(tmp_path / "a", Control(evaluate), Sends(s3="evaluate"), epochs=2)
    assert seen == [(3, False)]
    assert "evaluate (after step 3)" in log()
    train(tmp_path / "b", Control(), epochs=2)
    losses = [Journal.read(tmp_path / name).rows()["loss"].tolist() for name in "ab"]
    assert losses[0] == losses[1]


def test_the_log_says_when_a_save_is_durable(tmp_path: Path, log: Callable[[], str]) -> None:
    saver = Checkpoint(every_n_epochs=9, keep_last=None, async_save=False)
    train(tmp_path, Control(), Sends(s2="save", s5="save"), saver)
    lines = log()
    for step in (2, 5):
        assert f"save (after step {step})" in lines
        assert f"checkpoints/step-{step:08} [accel]" in f"{lines} [accel]"
        assert (tmp_path / "checkpoints" / f"step-{step:08}" / "manifest.json").exists()
    saved = [mark["path"][-1] for mark in marks(tmp_path, "save")]
    assert saved == ["2", "5", "6"]


def test_a_stop_ends_the_run_after_the_step(tmp_path: Path, log: Callable[[], str]) -> None:
    run = train(tmp_path, Control(), Sends(s4="stop"))
    assert (run.global_step, run.stop_reason) == (4, "accel ctl")
    assert "stop (after step 4)" in log()
    assert state_of(Journal.read(tmp_path)) == "ended"


def test_two_commands_at_once_are_done_one_after_the_other(tmp_path: Path) -> None:
    train(tmp_path, Control(), Sends(s2="set lr=0.01; set lr=0.02"))
    assert rates(tmp_path) == [0.1] * 2 + [0.01] + [0.02] * 3
    assert [mark["step"] for mark in marks(tmp_path)] == [2, 3]


def test_a_setting_reaches_the_loop_and_the_callbacks_and_survives_a_resume(
    tmp_path: Path, log: Callable[[], str]
) -> None:
    def parts() -> tuple[Control, Throughput, GradientNorm]:
        return Control(settings={"log_every": 5, "noise": 0.5}), Throughput(), GradientNorm()

    control, speed, norm = parts()
    saver = Checkpoint(every_n_steps=4, keep_last=None)
    sends = Sends(s2="set log_every=2", s3="set noise=1", s5="set noise=3.0")
    train(tmp_path, control, speed, norm, saver, sends)
    assert control.settings == {"log_every": 2, "noise": 3.0}
    assert (speed.log_every_n_steps, norm.every_n_steps) == (2, 2)
    assert "set log_every=2, which was 5" in log()
    for step in (5, 6):
        for manifest in (tmp_path / "checkpoints").glob(f"step-{step:08}/manifest.json"):
            manifest.unlink()
    control, speed, norm = parts()
    run = train(tmp_path, control, speed, norm, Checkpoint(every_n_steps=4, keep_last=None))
    assert run.resumed_from.endswith("step-00000004")
    assert control.settings == {"log_every": 2, "noise": 1.0}
    assert (speed.log_every_n_steps, norm.every_n_steps, control.number) == (2, 2, 2)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("set lrr=1.0", "'lrr' cannot be set. Did you mean 'lr'? This run can set: "),
        ("set lrr=1.0", "This run can set: log_every, lr, noise"),
        ("set lr=0", "lr=0 is no number above 0"),
        ("set lr=nan", "lr=nan is no number above 0"),
        ("set lr=fast", "lr=fast is no number above 0"),
        ("set log_every=0", "log_every=0 must be at least 1"),
        ("set log_every=2.5", "not like the present 50"),
        ("set noise=loud", "not like the present 0.5"),
        ("set noise=inf", "not like the present 0.5"),
        ("evaluate", "Control(evaluate=...)"),
        ("save", "give the Accelerator a Checkpoint"),
        ("halt", "a command is save, evaluate, stop, or set NAME=VALUE"),
    ],
)
def test_what_cannot_be_done_says_what_can(
    tmp_path: Path, command: str, problem: str, log: Callable[[], str]
) -> None:
    train(tmp_path, Control(settings={"noise": 0.5}), Throughput(), Sends(s2=command))
    lines = log()
    assert f"refused {command!r}: " in lines
    assert problem in lines
    assert marks(tmp_path) == []
    assert rates(tmp_path) == [0.1] * 6


def test_a_command_after_the_last_step_is_told_as_the_run_ends(
    tmp_path: Path, log: Callable[[], str]
) -> None:
    class Late(Callback):
        def on_train_end(self, run, model):
            Sends(s6="stop").on_train_batch_end(run, model, None, None, 0)

    train(tmp_path, Control(), Late())
    assert "the run ended at step 6, before it did: stop" in log()


def test_a_run_that_fails_says_what_it_has_not_done(tmp_path: Path, log: Callable[[], str]) -> None:
    def evaluate(run: Any) -> None:
        raise ValueError("no validation data")

    with pytest.raises(ValueError, match="no validation data"):
        train(tmp_path, Control(evaluate), Sends(s2="evaluate; stop"))
    assert "the run ended at step 2, before it did: evaluate, stop" in log()


def test_a_file_that_others_may_write_is_left_alone_and_the_run_goes_on(
    tmp_path: Path, log: Callable[[], str]
) -> None:
    class Opens(Callback):
        before = Control

        def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
            if run.global_step == 2:
                os.chmod(f"{run.default_root_dir}/journal/{run.run_id}/commands", 0o666)

    run = train(tmp_path, Control(), Opens())
    assert run.global_step == STEPS
    assert "cannot steer this run any more: " in log()


def test_without_a_journal_the_run_says_why_it_cannot_be_steered(
    tmp_path: Path, log: Callable[[], str]
) -> None:
    accel = Accelerator(cpu=True, callbacks=[Control()], journal=False, project_dir=tmp_path)
    data = accel.prepare(torch.utils.data.DataLoader(torch.ones(2)))
    with accel.run("plain"):
        list(data)
    assert "Control needs `with accel.run(...)` and a journal" in log()


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match="is no function"):
        Control(evaluate=3)
    for settings in ({"lr": 1.0}, {"layers": [1]}):
        with pytest.raises(ValueError, match="cannot be set; give text"):
            Control(settings=settings)
