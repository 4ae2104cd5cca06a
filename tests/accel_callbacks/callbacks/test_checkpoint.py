"""Checkpoint: intervals of all kinds, what is kept, an error, a preemption."""

from __future__ import annotations

import shutil
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.callbacks.checkpoint import Retention
from accel_callbacks.callbacks.monitor import Monitor
from accel_callbacks.checkpoint.async_save import BackgroundSaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from gated_files import Gate


def fit(
    *callbacks: Callback,
    epochs: int = 2,
    batches: int = 4,
    window: int = 1,
    resume: bool | str = True,
    optimizer: type = torch.optim.SGD,
    each_step=lambda run: None,
    scores=None,
) -> Accelerator:
    """Train a scalar, with dropout so that the random state matters."""
    torch.manual_seed(7)
    accel = Accelerator(cpu=True, gradient_accumulation_steps=window, callbacks=callbacks)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    loader = torch.utils.data.DataLoader(torch.randn(batches, 4), shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer(model.parameters(), lr=0.1), loader)
    with accel.run("fit", resume=resume) as run:
        for epoch in run.epochs(epochs):
            for batch in loader:
                with accel.accumulate(model):
                    accel.backward(model(batch).square().sum())
                    optimizer.step()
                    optimizer.zero_grad()
                each_step(run)
            if scores is not None:
                accel.log({"val": scores[epoch]})
    return accel


def weights(accel: Accelerator) -> list[float]:
    return accel.bare_models[0][1].weight.flatten().tolist()


def names(folder: Path) -> list[str]:
    return [info.name for info in checkpoint_io.CheckpointFolder(folder).list()]


def kept(folder: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in names(folder)]


class Written(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_checkpoint_saved(self, run, model, path):
        self.steps.append(int(path.rsplit("-", 1)[1]))


class Minutes:
    """A clock that goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, minutes: float) -> None:
        self.now += 60 * minutes

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def minutes(monkeypatch):
    """The clock by which the intervals of this test pass."""
    clock = Minutes()
    monkeypatch.setattr("accel_callbacks.callbacks.interval.time", clock)
    return clock


# --- when -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every": "3 steps"}, [3, 6, 8]),
        ({"every": "2 epochs"}, [8]),
        ({"every": "3 steps", "every_n_epochs": 1}, [3, 4, 6, 8]),
        ({"every": "0.25 run"}, [2, 4, 6, 8, 8]),
        ({"every_seconds": 60}, [1, 2, 3, 4, 5, 6, 7, 8, 8]),
        ({"every": "1 h"}, [8]),
        ({"every_seconds": timedelta(hours=1)}, [8]),
        ({"every_seconds": "2 min", "every_n_epochs": 100}, [2, 4, 6, 8, 8]),
        ({"every": "3 min"}, [3, 6, 8]),
    ],
)
def test_saves_come_at_their_intervals(tmp_path, minutes, options, steps):
    written = Written()
    saver = Checkpoint(tmp_path, keep_last=None, **options)
    fit(saver, written, each_step=lambda run: minutes.wait(1))
    assert written.steps == steps


@pytest.mark.parametrize(
    ("options", "expected"),
    # five weights, two averages of each, and the number of steps of two parameters
    [({}, [(5 + 10 + 2) * 4]), ({"async_save": False}, []), ({"trainable_only": True}, [])],
)
def test_the_memory_of_the_first_save_is_taken_after_the_first_step(
    tmp_path, monkeypatch, options, expected
):
    reserved, steps = [], []
    real = BackgroundSaves.reserve
    monkeypatch.setattr(
        BackgroundSaves, "reserve", lambda saves, size: reserved.append(size) or real(saves, size)
    )
    saver = Checkpoint(tmp_path, every_n_steps=3, **options)
    fit(
        saver,
        optimizer=partial(torch.optim.Adam, foreach=False),
        window=2,
        each_step=lambda run: steps.append((run.global_step, len(reserved))),
    )
    assert reserved == expected
    # a hook at the end of a batch comes as the next one begins
    assert [step for step, count in steps if count][:1] == [1] * len(expected)


def test_a_clock_waits_for_the_end_of_the_window(tmp_path, minutes):
    written = Written()
    saver = Checkpoint(tmp_path, every="1 min")
    fit(saver, written, window=3, epochs=1, each_step=lambda run: minutes.wait(1))
    assert written.steps == [1, 2, 2]


def test_any_save_sets_the_clock_back(tmp_path, minutes):
    written = Written()
    saver = Checkpoint(tmp_path, every="1 h", every_n_steps=3)

    def each_step(run):
        minutes.wait(50 if run.global_step in (3, 4) else 0)

    fit(saver, written, each_step=each_step)
    assert written.steps == [3, 6, 8]


def test_a_checkpoint_can_be_asked_for(tmp_path):
    written = Written()

    def each_step(run):
        if run.global_step in (3, 4):
            run.save_now("the user wants one")

    fit(Checkpoint(tmp_path, every="4 steps"), written, each_step=each_step)
    assert written.steps == [3, 4, 8, 8]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 100}, "'100 steps' or '100 s'"),
        ({"every": "10 stops"}, "is not a unit"),
        ({"every": "5 steps", "every_n_steps": 5}, "every_n_steps: give one"),
        ({"every": "5 epochs", "every_n_epochs": 5}, "every_n_epochs: give one"),
        ({"every": "5 s", "every_seconds": 5}, "every_seconds: give one"),
        ({"every_seconds": "5 steps"}, "must be a time"),
        ({"every_seconds": 0}, "above 0"),
        (
            {"keep": checkpoint_io.keep_last(2), "keep_last": 2},
            "keep replaces keep_last.*leave them out",
        ),
        (
            {"keep": checkpoint_io.keep_last(2), "keep_every": 2},
            "keep replaces keep_last.*leave them out",
        ),
        ({"keep_every": 0}, "keep_every=0"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Checkpoint("c", **options)


def test_what_is_no_policy_is_refused():
    with pytest.raises(TypeError, match="is not a policy"):
        Checkpoint("c", keep=3)


# --- what stays -------------------------------------------------------------------------------


def test_a_policy_says_what_stays(tmp_path):
    policy = checkpoint_io.keep_last(2) | checkpoint_io.keep_every(3)
    fit(Checkpoint(tmp_path, every="1 step", keep=policy))
    assert kept(tmp_path) == [3, 6, 7, 8]


def test_a_monitored_score_counts_for_one_checkpoint_only(tmp_path):
    saver = Checkpoint(tmp_path, every="2 steps", keep_last=None, monitor="val")

    def each_step(run):
        if run.global_step in (1, 5):
            run.accelerator.log({"val": 1.0 / run.global_step})

    fit(saver, each_step=each_step)
    infos = checkpoint_io.CheckpointFolder(tmp_path).list()
    scores = [info.manifest.metadata.get("score", {}).get("value") for info in infos]
    assert (kept(tmp_path), scores) == ([2, 4, 6, 8], [1.0, None, 0.2, None])
    assert saver.best_path == str(tmp_path / "step-00000006")


def test_a_state_has_the_best_path_as_well():
    saver, other = (Checkpoint("runs", monitor="val") for _ in range(2))
    saver._record.read({"val": 0.5})
    saver._record.add_save((3, 1, False), "runs/step-00000003")
    other.load_state_dict(saver.state_dict())
    assert other.best_path == "runs/step-00000003"
    assert other.state_dict() == saver.state_dict()


def test_a_policy_sees_the_scores(tmp_path):
    policy = checkpoint_io.keep_best(1, "val")
    saver = Checkpoint(tmp_path, every="1 epoch", monitor="val", keep=policy)
    fit(saver, epochs=4, scores=[3.0, 1.0, 2.0, 4.0])
    assert kept(tmp_path) == [8, 16]  # the best, and the newest, which always stays
    assert saver.best_path == str(tmp_path / "step-00000008")
    assert saver.last_path == str(tmp_path / "step-00000016")


def test_a_function_is_a_policy(tmp_path):
    fit(Checkpoint(tmp_path, every="1 step", keep=lambda infos: infos[:1]))
    assert kept(tmp_path) == [1, 8]


def test_a_resume_of_checkpoints_without_a_score_has_no_best(tmp_path):
    def saver() -> Checkpoint:
        return Checkpoint(tmp_path, every="1 epoch", monitor="val")

    fit(saver(), epochs=1)
    resumed = saver()
    fit(resumed, epochs=1)
    assert (resumed.best_path, resumed.last_path) == (None, str(tmp_path / "step-00000004"))


def test_a_best_checkpoint_that_cannot_be_read_is_not_replaced_in_silence(tmp_path):
    def saver() -> Checkpoint:
        return Checkpoint(tmp_path, every="1 epoch", monitor="val", keep=None)

    fit(saver(), epochs=3, scores=[3.0, 1.0, 2.0])
    (tmp_path / "step-00000008" / "manifest.json").write_text("{")
    resumed = saver()
    with pytest.warns(UserWarning, match="step-00000008, noted as the best .* cannot be read"):
        fit(resumed, epochs=3, scores=[])
    assert resumed.best_path == str(tmp_path / "step-00000012")


def test_the_score_at_the_end_of_an_epoch_is_not_of_a_run_resumed_before_it(tmp_path):
    """The last step of the epoch is saved twice: when it ends, and with the score of the epoch."""
    best: list[str | None] = []

    def save_inside(run):
        if run.global_step == 4:
            run.accelerator.save_state(tmp_path / "inside")

    class Notes(Callback):
        def on_train_epoch_end(self, run, model):
            best.append(saver.best_path)

    saver = Checkpoint(tmp_path / "all", every_n_steps=4, monitor="val")
    fit(saver, epochs=1, scores=[0.5], each_step=save_inside)
    assert saver.best_path == str(tmp_path / "all" / "step-00000004")
    saver = Checkpoint(tmp_path / "all", every_n_steps=4, monitor="val")
    fit(Notes(), saver, epochs=1, scores=[0.5], resume=str(tmp_path / "inside"))
    assert best == [None]
    assert saver.best_path == str(tmp_path / "all" / "step-00000004")


def test_a_run_resumed_after_its_last_epoch_is_saved_as_finished(tmp_path):
    """It has nothing left to train, and was killed before its last save."""

    class SavesEnd(Callback):
        def on_train_epoch_end(self, run, model):
            run.save_checkpoint(str(tmp_path / f"end-{run.current_epoch}"))

    folder = tmp_path / "all"
    fit(SavesEnd(), Checkpoint(folder, every_n_steps=100))
    assert names(folder) == ["step-00000008"]
    shutil.rmtree(folder / "step-00000008")
    fit(SavesEnd(), Checkpoint(folder, every_n_steps=100), resume=str(tmp_path / "end-1"))
    assert names(folder) == ["step-00000008"]


def test_with_a_monitor_one_best_stays_unless_told_otherwise(tmp_path):
    folder = checkpoint_io.CheckpointFolder(tmp_path)
    for step, value in enumerate((3.0, 1.0, 2.0)):
        score = {"score": {"monitor": "val", "value": value}}
        checkpoint_io.save(folder.path(step), {}, metadata=score)
    stays = Retention(keep_last=1, monitor=Monitor("val"))(folder.list())
    assert sorted(info.name for info in stays) == ["step-00000001", "step-00000002"]


# --- an error ---------------------------------------------------------------------------------


def failing(at: int, error: BaseException):
    def each_step(run):
        if run.global_step == at:
            raise error

    return each_step


def on_exception(folder: Path) -> Checkpoint:
    return Checkpoint(folder, every="2 steps", on_exception=True)


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt()])
def test_an_error_leaves_a_checkpoint_to_go_on_from(tmp_path, capfd, error):
    with pytest.raises(type(error)):
        fit(on_exception(tmp_path), each_step=failing(5, error))
    assert names(tmp_path) == ["exception-step-00000005", "step-00000002", "step-00000004"]
    path = str(tmp_path / "exception-step-00000005")
    assert f"resume={path!r}" in capfd.readouterr().err
    manifest = checkpoint_io.read_manifest(path)
    assert manifest.metadata["exception"].startswith(type(error).__name__)
    steps = []
    resumed = fit(
        Checkpoint(tmp_path), resume=path, each_step=lambda run: steps.append(run.global_step)
    )
    assert steps == [6, 7, 8]
    assert weights(resumed) == weights(fit())


class Bad(torch.utils.data.Dataset):
    """The sample of one index cannot be read, the first time."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == self.bad:
            self.bad = -1
            raise OSError("cannot read it")
        return torch.tensor([float(index)])


@pytest.mark.parametrize("where", ["data", "forward", "step", "last step", "validation"])
def test_wherever_the_error_comes_from_each_sample_is_trained_on_once(tmp_path, where):
    trained = []

    def go(fails: str | None, resume: bool | str) -> None:
        accel = Accelerator(cpu=True, callbacks=[on_exception(tmp_path)])
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.001)
        loader = torch.utils.data.DataLoader(Bad(2 if fails == "data" else -1))
        model, optimizer, loader = accel.prepare(model, sgd, loader)
        with accel.run("once", resume=resume) as run:
            for epoch in run.epochs(2):
                for batch in loader:
                    if (fails, run.global_step) == ("forward", 2):
                        raise OSError("cannot multiply")
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    trained.append((epoch, int(batch)))
                    if (fails, run.global_step) in [("step", 2), ("last step", 4)]:
                        raise OSError("cannot go on")
                if fails == "validation":
                    raise OSError("cannot validate")

    with pytest.raises(OSError, match="cannot"):
        go(where, False)
    (path,) = tmp_path.glob("exception-*")
    go(None, str(path))
    assert trained == [(epoch, sample) for epoch in range(2) for sample in range(4)]


def test_a_run_resumes_from_the_error_only_if_told_to(tmp_path):
    with pytest.raises(ValueError, match="bad"):
        fit(on_exception(tmp_path), each_step=failing(5, ValueError("bad")))
    steps = []
    saver = Checkpoint(tmp_path, every="1 step", keep_last=1)
    fit(saver, each_step=lambda run: steps.append(run.global_step))
    assert steps == [5, 6, 7, 8]
    # what an error has left stays, beside the newest and the one that was resumed from
    assert names(tmp_path) == ["exception-step-00000005", "step-00000004", "step-00000008"]


def test_of_the_checkpoints_of_errors_only_the_newest_stays(tmp_path):
    for step in (3, 5, 7):
        with pytest.raises(ValueError, match="bad"):
            fit(on_exception(tmp_path), each_step=failing(step, ValueError("bad")))
    fit(Checkpoint(tmp_path, every="1 step", keep_last=1))
    assert [name for name in names(tmp_path) if "exception" in name] == ["exception-step-00000007"]


class Breaks(torch.optim.SGD):
    """Fails in the middle of its third step."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            self.param_groups[0]["params"][0].data.zero_()
            raise ValueError("half a step")
        return super().step(closure)


def test_half_a_step_is_not_saved(tmp_path, capfd):
    with pytest.raises(ValueError, match="half a step"):
        fit(on_exception(tmp_path), optimizer=Breaks)
    assert names(tmp_path) == ["step-00000002"]
    assert "in the middle of an optimizer step" in capfd.readouterr().err


class Fails(Callback):
    """Fails after its third step, inside of the prepared optimizer's `step`."""

    def on_after_optimizer_step(self, run, model, optimizer):
        if run.global_step == 3:
            raise ValueError("a hook")


def test_an_error_of_a_hook_after_a_whole_step_is_saved(tmp_path):
    with pytest.raises(ValueError, match="a hook"):
        fit(on_exception(tmp_path), Fails())
    assert names(tmp_path) == ["exception-step-00000003", "step-00000002"]


class CannotSave(Callback):
    """Its state is what cannot be saved, from the third step on."""

    broken = False

    def on_after_optimizer_step(self, run, model, optimizer):
        self.broken = run.global_step >= 3

    def state_dict(self):
        return {"value": object() if self.broken else 1}


def test_a_save_that_fails_does_not_hide_the_error(tmp_path):
    saver = on_exception(tmp_path)
    match = "state at the error could not be saved"
    with pytest.warns(UserWarning, match=match), pytest.raises(ValueError, match="bad"):
        fit(saver, CannotSave(), each_step=failing(3, ValueError("bad")))
    assert names(tmp_path) == ["step-00000002"]


def test_without_being_asked_to_nothing_is_saved_at_an_error(tmp_path):
    with pytest.raises(ValueError, match="bad"):
        fit(Checkpoint(tmp_path, every="2 steps"), each_step=failing(3, ValueError("bad")))
    assert names(tmp_path) == ["step-00000002"]


# --- a preemption -----------------------------------------------------------------------------


def preempting(at: int):
    def each_step(run):
        if run.global_step == at:
            run.preempt("the cluster wants it back")

    return each_step


def test_what_gives_way_is_saved_once_and_durable(tmp_path):
    events = []

    class After(Callback):
        runs_last = True
        after = (Checkpoint,)

        def on_preempt(self, run, model, reason):
            events.extend(["preempted", *kept(tmp_path)])

    written = Written()
    accel = fit(
        Checkpoint(tmp_path, every="3 steps", every_n_epochs=1),
        After(),
        written,
        each_step=preempting(5),
    )
    assert accel.current_run.stop_reason == "the cluster wants it back"
    assert events == ["preempted", 3, 4, 5]
    assert written.steps == [3, 4, 5]


def test_a_preemption_where_a_save_has_begun_waits_for_that_one(tmp_path):
    written = Written()
    fit(Checkpoint(tmp_path, every="3 steps"), written, each_step=preempting(3))
    assert written.steps == [3]


def test_the_next_start_ends_as_if_nothing_had_been(tmp_path):
    fit(Checkpoint(tmp_path), each_step=preempting(3))
    steps = []
    resumed = fit(Checkpoint(tmp_path), each_step=lambda run: steps.append(run.global_step))
    assert steps == [4, 5, 6, 7, 8]
    assert weights(resumed) == weights(fit())


class Mends(Callback):
    """Lets the save that is under way fail, and the next one through."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_preempt(self, run, model, reason):
        run.accelerator.loop.saves._saver._handle.join()
        self.gate.mend()


def test_a_save_that_failed_before_does_not_cost_the_one_of_the_preemption(tmp_path):
    gate = Gate(tmp_path)
    saver = Checkpoint(f"{gate.root}/c", every="3 steps", storage_options=gate.options)

    def each_step(run):
        if run.global_step == 3:
            gate.break_writes()
        preempting(3)(run)

    with pytest.warns(UserWarning, match="the previous save failed.*on fire"):
        fit(saver, Mends(gate), each_step=each_step)
    assert kept(tmp_path / "c") == [3]


class CannotBeSaved(Callback):
    """Every save fails; notes at which step each was tried."""

    def __init__(self):
        self.tried = []

    def on_save_checkpoint(self, run, model, checkpoint):
        self.tried.append(run.global_step)
        raise checkpoint_io.CheckpointError("no space left")


def test_a_failed_save_is_not_tried_again_at_each_batch_of_the_next_window(training, tmp_path):
    fails = CannotBeSaved()
    saver = Checkpoint(tmp_path, every_n_steps=1, when_failed="warn")
    t = training(fails, saver, batches=6, gradient_accumulation_steps=3)

    def train() -> None:
        with t.accel.run("demo") as run:
            for _ in run.epochs(1):
                for batch in t.train:
                    with t.accel.accumulate(t.model):
                        t.step(batch)

    with pytest.warns(UserWarning, match="continues without"):
        train()
    assert fails.tried == [1, 2, 2]  # the last is that of the end of the run
