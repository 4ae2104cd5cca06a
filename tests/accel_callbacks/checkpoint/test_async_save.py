"""save_state(async_save=True) and the callback that saves: what is written, and when it is told."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint
from checkpoint_io.format.tree import TreeEncoder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from gated_files import Gate


class Notes(Callback):
    """Writes down at which step which checkpoint became durable."""

    def __init__(self):
        self.saved = []

    def on_checkpoint_saved(self, run, model, path):
        self.saved.append((run.global_step, path.rsplit("/", 1)[-1]))


class Job:
    """A linear model with Adam, a loader of eight batches, and a step function."""

    def __init__(self, *callbacks: Callback, window: int = 1, **options):
        self.notes = Notes()
        self.accel = Accelerator(
            cpu=True,
            callbacks=[self.notes, *callbacks],
            gradient_accumulation_steps=window,
            **options,
        )
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        self.model, self.optimizer, self.data = self.accel.prepare(
            model,
            torch.optim.Adam(model.parameters(), lr=0.1),
            torch.utils.data.DataLoader(torch.ones(16, 4), 2),
        )

    def step(self, batch: torch.Tensor) -> None:
        with self.accel.accumulate(self.model):
            self.accel.backward(self.model(batch).square().sum())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def save(self, gate: Gate, name: str = "c", **options) -> str:
        options = {"async_save": True, "storage_options": gate.options, **options}
        return self.accel.save_state(f"{gate.root}/{name}", **options)


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path)
    yield gate
    gate.open()


def read(gate: Gate, name: str = "c") -> dict:
    return checkpoint_io.load(f"{gate.root}/{name}", storage_options=gate.options).state


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def until_ended(job: Job) -> None:
    """Wait for the thread, without asking how it ended."""
    job.accel.loop.saves._saver._handle.join()


def test_it_is_the_state_at_the_call_while_training_goes_on(gate):
    job = Job()
    wanted = None
    for index, batch in enumerate(job.data):
        job.step(batch)
        if index == 1:
            gate.shut()
            wanted = job.weights()
            moments = job.optimizer.state_dict()["state"][0]["exp_avg"].clone()
            path = job.save(gate)
        assert not job.accel.current_run.should_stop
        if index > 1:
            assert job.accel.loop.saves.pending
            assert job.notes.saved == []
    gate.open()
    job.accel.wait_for_save()
    assert job.accel.current_run.global_step == 8
    state = read(gate)
    assert not same(job.weights(), wanted)
    assert same(state["models"]["0"], wanted)
    assert torch.equal(state["optimizers"]["0"]["state"]["0.weight"]["exp_avg"], moments)
    assert state["run"]["global_step"] == 2
    assert job.notes.saved == [(8, "c")]
    assert path == f"{gate.root}/c"


def test_it_is_told_at_the_end_of_the_step_in_which_it_has_ended(gate):
    job = Job()
    gate.shut()
    for index, batch in enumerate(job.data):
        job.step(batch)
        if index == 0:
            job.save(gate)
        if index == 4:
            gate.open()
            until_ended(job)
            assert job.notes.saved == []  # not in the middle of the loop's body
    assert job.notes.saved == [(5, "c")]
    assert not job.accel.loop.saves.pending


def save_one(job: Job, gate: Gate) -> None:
    job.save(gate)
    until_ended(job)


@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_without_a_prepared_loader_is_told_at_the_end_of_its_step(gate, fails):
    job = Job(window=2)
    batches = list(torch.ones(6, 2, 4))
    job.step(batches[0])
    (fail_one if fails else save_one)(job, gate)  # in a window, whose end comes first
    assert job.notes.saved == []
    if fails:
        with pytest.raises(checkpoint_io.CheckpointError, match="on fire"):
            job.step(batches[1])
    else:
        job.step(batches[1])
        assert job.notes.saved == [(1, "c")]
    assert not job.accel.loop.saves.pending


def test_it_is_not_told_inside_of_a_gradient_window(gate):
    job = Job(window=4)
    gate.shut()
    for index, batch in enumerate(job.data):
        job.step(batch)
        if index == 0:
            job.save(gate)
            gate.open()
            until_ended(job)
        if index in (1, 2, 3):
            assert job.notes.saved == []
    assert job.notes.saved == [(1, "c")]


def test_a_save_that_waits_is_durable_and_told_when_it_returns(gate):
    job = Job()
    job.save(gate, async_save=False)
    assert job.notes.saved == [(0, "c")]
    assert same(read(gate)["models"]["0"], job.weights())


# --- the next one ---------------------------------------------------------------------------------


def test_the_next_save_waits_and_one_that_skips_returns_an_empty_path(gate):
    job = Job()
    gate.shut()
    job.save(gate, "a")
    with pytest.warns(checkpoint_io.CheckpointWarning, match="skipped"):
        assert job.save(gate, "b", when_busy="skip") == ""
    gate.open()
    job.save(gate, "c")
    assert job.notes.saved == [(0, "a")]
    job.accel.wait_for_save()
    assert job.notes.saved == [(0, "a"), (0, "c")]
    assert not Path(gate.root.removeprefix("gated://"), "b").exists()


def test_a_skipped_save_calls_no_hook(gate):
    calls = []

    class Saving(Callback):
        def on_save_checkpoint(self, run, model, checkpoint):
            calls.append(run.global_step)

    job = Job(Saving())
    gate.shut()
    job.save(gate, "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.save(gate, "b", when_busy="skip")
    gate.open()
    job.accel.wait_for_save()
    assert calls == [0]


@pytest.mark.parametrize("async_save", [True, False])
def test_an_unknown_policy_is_refused_before_anything_is_done(gate, async_save):
    with pytest.raises(ValueError, match="'wait' or 'skip'"):
        Job().save(gate, async_save=async_save, when_busy="later")


def test_two_accelerators_save_side_by_side(gate):
    first, second = Job(), Job()
    gate.shut()
    first.save(gate, "a")
    second.save(gate, "b")
    assert first.accel.loop.saves.pending
    assert second.accel.loop.saves.pending
    gate.open()
    second.accel.wait_for_save()
    assert second.notes.saved == [(0, "b")]
    assert first.notes.saved == []
    first.accel.wait_for_save()
    assert first.notes.saved == [(0, "a")]


# --- errors ---------------------------------------------------------------------------------------


def fail_one(job: Job, gate: Gate) -> None:
    gate.break_writes()
    job.save(gate, "bad")
    until_ended(job)
    gate.mend()


ASKING = {
    "wait_for_save": lambda job, gate: job.accel.wait_for_save(),
    "save_state": lambda job, gate: job.save(gate),
    "a save that waits": lambda job, gate: job.save(gate, async_save=False),
    "load_state": lambda job, gate: job.accel.load_state(
        f"{gate.root}/good", storage_options=gate.options
    ),
    "end_training": lambda job, gate: job.accel.end_training(),
    "run": lambda job, gate: job.accel.run("next").__enter__(),
    "the next step": lambda job, gate: [job.step(batch) for batch in job.data],
    "the end of an epoch": lambda job, gate: list(job.accel.current_run.epochs(1)),
}


@pytest.mark.parametrize("ask", ASKING)
def test_an_error_is_raised_by_what_comes_next_and_only_once(gate, ask):
    job = Job()
    job.save(gate, "good", async_save=False)
    fail_one(job, gate)
    with pytest.raises(checkpoint_io.CheckpointError, match="on fire"):
        ASKING[ask](job, gate)
    assert not job.accel.loop.saves.pending
    job.save(gate, "later")
    job.accel.wait_for_save()
    assert same(read(gate, "later")["models"]["0"], job.weights())
    assert [name for _, name in job.notes.saved] == ["good", "later"]


def test_an_error_ends_a_run_at_the_next_step(gate):
    job = Job()
    with pytest.raises(checkpoint_io.CheckpointError, match="on fire"):
        fit(job, body=lambda index: fail_one(job, gate) if index == 2 else None)
    assert job.accel.current_run.global_step == 3


def test_a_run_that_ends_well_ends_after_its_save(gate):
    job = Job()
    ends = []

    class Ends(Callback):
        def on_fit_end(self, run, model):
            ends.append(list(job.notes.saved))

    job.accel.loop.dispatch.add(Ends())
    with job.accel.run("demo", resume=False):
        for batch in job.data:
            job.step(batch)
        job.save(gate)
    assert job.notes.saved == ends[0] == [(8, "c")]


def test_a_run_that_ends_with_an_error_lets_its_save_end_and_says_so(gate, capsys):
    job = Job()

    def train() -> None:
        with job.accel.run("demo", resume=False):
            job.save(gate)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        train()
    assert "has ended well" in capsys.readouterr().err
    assert same(read(gate)["models"]["0"], job.weights())
    assert job.notes.saved == []


def test_a_run_that_ends_with_an_error_warns_of_a_save_that_fails_too(gate):
    job = Job()

    def train() -> None:
        with job.accel.run("demo", resume=False):
            fail_one(job, gate)
            raise ValueError("mine")

    with pytest.warns(UserWarning, match="on fire"), pytest.raises(ValueError, match="mine"):
        train()
    job.accel.wait_for_save()


def test_the_error_of_an_end_in_a_finally_is_not_hidden_by_the_save(gate):
    job = Job()

    def script() -> None:
        try:
            job.save(gate)
            raise ValueError("mine")
        finally:
            job.accel.end_training()

    with pytest.raises(ValueError, match="mine"):
        script()
    assert same(read(gate)["models"]["0"], job.weights())


# --- memory and cost ------------------------------------------------------------------------------


def test_free_memory_gives_the_copies_back(gate):
    job = Job()
    job.save(gate)
    job.accel.wait_for_save()
    buffers = job.accel.loop.saves._saver._buffers
    assert buffers.nbytes > 0
    job.accel.free_memory()
    assert buffers.nbytes == 0


def test_without_a_save_under_way_the_loop_asks_nobody(gate, monkeypatch):
    job = Job()
    job.accel.loop.dispatch.ends_batches = True
    monkeypatch.setattr(job.accel.loop.saves, "poll", lambda: pytest.fail("asked"))
    for batch in job.data:
        job.step(batch)


# --- only what is trained -------------------------------------------------------------------------


def test_frozen_parameters_can_be_left_out_and_keep_their_values_in_a_load(gate):
    job = Job()
    job.model.bias.requires_grad_(False)
    job.save(gate, async_save=False, trainable_only=True)
    assert list(read(gate)["models"]["0"]) == ["weight"]
    assert read(gate)["dropped_weights"] == {"0": ["bias"]}
    saved = job.weights()
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(9)
    with pytest.warns(UserWarning, match="1 of 1 frozen weights differ"):
        job.accel.load_state(f"{gate.root}/c", storage_options=gate.options)
    assert torch.equal(job.model.weight, saved["weight"])
    assert torch.equal(job.model.bias, torch.full((3,), 9.0))


def test_files_that_a_save_hook_writes_are_listed_and_others_are_not(tmp_path):
    job = Job()
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "mine.txt").write_text("not of the checkpoint")
    job.accel.register_save_state_pre_hook(
        lambda models, weights, place: Path(place, "adapter.json").write_text("{}")
    )
    job.accel.save_state(folder)
    assert checkpoint_io.read_manifest(folder).metadata["extra_files"] == ["adapter.json"]
    job.accel.save_state(folder)
    assert checkpoint_io.read_manifest(folder).metadata["extra_files"] == ["adapter.json"]


# --- the callback ---------------------------------------------------------------------------------


def saver(gate: Gate, **options) -> Checkpoint:
    options = {"every_n_steps": 2, "keep_last": 2, "storage_options": gate.options, **options}
    return Checkpoint(f"{gate.root}/run", **options)


def kept(gate: Gate) -> list[int]:
    folder = checkpoint_io.CheckpointFolder(f"{gate.root}/run", storage_options=gate.options)
    return [info.manifest.metadata["step"] for info in folder.list()]


def fit(job: Job, epochs: int = 1, body=lambda index: None) -> None:
    with job.accel.run("demo") as run:
        for _ in run.epochs(epochs):
            for index, batch in enumerate(job.data):
                job.step(batch)
                body(index)


def test_the_callback_saves_in_the_background_and_notes_what_is_durable(gate):
    callback = saver(gate)
    job = Job(callback)
    seen = []

    def body(index: int) -> None:
        if index == 1:
            gate.shut()  # step 2 is saved after this body
        if index == 2:
            seen.append((callback.last_path, job.accel.loop.saves.pending))
            gate.open()
            until_ended(job)
        if index == 3:
            seen.append(callback.last_path)

    fit(job, body=body)
    assert seen == [(None, True), f"{gate.root}/run/step-00000002"]
    assert callback.last_path == f"{gate.root}/run/step-00000008"
    assert kept(gate) == [6, 8]
    # The last step is saved once more when its epoch is done.
    assert [name for _, name in job.notes.saved] == [f"step-0000000{n}" for n in (2, 4, 6, 8, 8)]


def test_the_callback_can_let_training_wait(gate):
    job = Job(saver(gate, async_save=False))
    steps = []
    fit(job, body=lambda index: steps.append(len(job.notes.saved)))
    assert steps == [0, 0, 1, 1, 2, 2, 3, 3]
    assert job.accel.loop.saves._saver is None


def test_the_callback_can_skip_but_not_the_finished_run(gate):
    callback = saver(gate, when_busy="skip", keep_last=None)
    job = Job(callback)

    def body(index: int) -> None:
        if index == 1:
            gate.shut()
        if index == 7:
            gate.open()

    with pytest.warns(checkpoint_io.CheckpointWarning, match="skipped"):
        fit(job, body=body)
    assert {2, 8} <= set(kept(gate)) <= {2, 8}


def test_a_callback_that_lets_training_wait_skips_nothing_for_the_save_of_another(gate):
    job = Job(saver(gate, async_save=False, when_busy="skip", keep_last=None))

    def body(index: int) -> None:
        if index == 1:
            gate.shut()
            job.save(gate, "by-hand")
            threading.Timer(0.3, gate.open).start()

    fit(job, body=body)
    assert kept(gate) == [2, 4, 6, 8]


def test_what_a_checkpoint_says_of_the_callback_is_right_after_a_resume(gate):
    def best() -> Checkpoint:
        return saver(gate, every_n_steps=None, monitor="loss", every_n_epochs=1)

    first = best()
    job = Job(first)
    with job.accel.run("demo") as run:
        for epoch in run.epochs(3):
            for batch in job.data:
                job.step(batch)
            job.accel.log({"loss": [3.0, 1.0, 2.0][epoch]})
    assert first.best_path == f"{gate.root}/run/step-00000016"
    resumed = best()
    with Job(resumed).accel.run("demo"):
        assert resumed.best_path == f"{gate.root}/run/step-00000016"


def test_a_save_that_fails_is_neither_the_last_nor_the_best(gate):
    callback = saver(gate, every_n_steps=None, every_n_epochs=1, monitor="loss", keep_last=None)
    job = Job(callback)

    def train() -> None:
        with job.accel.run("demo") as run:
            for epoch in run.epochs(2):
                for batch in job.data:
                    job.step(batch)
                if epoch == 1:
                    job.accel.wait_for_save()
                    gate.break_writes()
                job.accel.log({"loss": [3.0, 1.0][epoch]})

    with pytest.raises(checkpoint_io.CheckpointError, match="on fire"):
        train()
    gate.mend()
    assert callback.last_path == callback.best_path == f"{gate.root}/run/step-00000008"
    assert callback.state_dict()["best_score"] == 3.0
    assert callback.state_dict()["fresh_score"] == 1.0  # for the next checkpoint
    assert kept(gate) == [8]


@pytest.mark.parametrize("async_save", [True, False])
def test_the_callback_can_train_on_after_a_save_that_failed(gate, async_save):
    callback = saver(gate, every_n_steps=3, when_failed="warn", async_save=async_save)
    job = Job(callback)

    def train() -> list[int]:
        steps = []
        with job.accel.run("demo") as run:
            for _ in run.epochs(1):
                for batch in job.data:
                    if run.global_step == 2:
                        gate.break_writes()  # for the save at step 3
                    if run.global_step == 5:
                        job.accel.wait_for_save()
                        gate.mend()
                    job.step(batch)
                    steps.append(run.global_step)
        return steps

    with pytest.warns(UserWarning, match="training continues without this checkpoint.*on fire"):
        assert train() == list(range(1, 9))
    assert callback.last_path == f"{gate.root}/run/step-00000008"
    assert kept(gate)[-2:] == [6, 8]
    assert 3 not in kept(gate)


def test_every_nth_step_is_kept_besides_the_newest(gate):
    fit(Job(saver(gate, every_n_steps=1, keep_last=1, keep_every=3)))
    assert kept(gate) == [3, 6, 8]


def test_the_one_resumed_from_stays(gate):
    fit(Job(saver(gate)))
    job = Job(saver(gate, keep_last=1))
    fit(job, epochs=2)
    assert job.accel.current_run.resumed_from == f"{gate.root}/run/step-00000008"
    assert kept(gate) == [8, 16]


def test_a_folder_that_cannot_be_written_ends_the_run_before_the_first_step(gate):
    job = Job(saver(gate))
    gate.break_writes()
    steps = []
    with pytest.raises((OSError, checkpoint_io.CheckpointError), match="on fire"):
        fit(job, body=steps.append)
    assert steps == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_every": 0}, "keep_every"),
        ({"when_busy": "no"}, "when_busy"),
        ({"when_failed": "no"}, "when_failed"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Checkpoint("anywhere", **options)


def test_the_training_thread_does_not_encode_the_state(gate, monkeypatch):
    """It takes a snapshot; the metadata of the manifest are few values."""
    job, threads = Job(), set()
    for batch in job.data:
        job.step(batch)
    encode = TreeEncoder.encode

    def noting(self, value, path=()):
        if self._root != "metadata":
            threads.add(threading.current_thread() is threading.main_thread())
        return encode(self, value, path)

    monkeypatch.setattr(TreeEncoder, "encode", noting)
    gate.shut()
    job.save(gate)
    gate.open()
    job.accel.wait_for_save()
    assert threads == {False}
    assert same(read(gate)["models"]["0"], job.weights())
