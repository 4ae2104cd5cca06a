"""A run owns its folders: a second start, a killed holder, a stopped one, an Accelerator beside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, ProjectConfiguration
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.checkpoint import folder_leases
from accel_callbacks.checkpoint.folder_leases import FolderLeases
from accel_callbacks.cli.main import main
from checkpoint_io import CheckpointFolder, Lease, LeaseError
from checkpoint_io.storage.lease import LEASE
from loggers import read_jsonl
from tests.support import warm

#: Trains as many steps as each line says, and saves after every second one.
JOB = """
import json, sys
import torch
from accel_callbacks import Accelerator, ProjectConfiguration
from accel_callbacks.callbacks import Checkpoint

folder, name, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
logs = options.pop("logs", True)
saver = Checkpoint(every_n_steps=2, keep_last=None, async_save=False, when_failed="warn")
accel = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(folder, **options),
    log_with=["jsonl", "csv"] if logs else None,
    callbacks=[saver],
)
model, optimizer = accel.prepare(*[m := torch.nn.Linear(1, 1), torch.optim.SGD(m.parameters(), 1)])
with accel.run(name, resume="anyway") as run:
    print("begun at", run.global_step, flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            with accel.accumulate(model):
                accel.backward(model(torch.ones(1, 1)).mean())
                optimizer.step()
                optimizer.zero_grad()
            if logs:
                accel.log({name: 1.0})
                accel.tracking.hub.flush()
        print("at", run.global_step, flush=True)
print("ended", flush=True)
"""


class Job:
    """A process that trains."""

    def __init__(self, folder: Path, name: str, **options: Any) -> None:
        self.folder = folder
        self.process = warm.Popen(
            [sys.executable, "-c", JOB, str(folder), name, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        return str(self.process.stdout.readline()).strip()

    def ask(self, steps: int) -> None:
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()

    def train(self, steps: int) -> str:
        self.ask(steps)
        return self.answer()

    def end(self) -> tuple[int, str]:
        """Close its input, and return its exit code and the line of its LeaseError, if any."""
        _, errors = self.process.communicate()
        found = [line for line in errors.splitlines() if "LeaseError: " in line]
        assert bool(found) == bool(self.process.returncode), errors
        return self.process.returncode, found[0] if found else ""

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts jobs on one folder."""
    jobs: list[Job] = []

    def begin(name: str, **options: Any) -> Job:
        jobs.append(Job(tmp_path / "runs", name, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.communicate()


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the leases, and the journals, which a run that lives writes at any time."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LEASE]
    files = [path for path in files if "journal" not in path.parts]
    return {str(path): path.read_bytes() for path in files}


def journals(folder: Path) -> dict[str, bytes]:
    """The files of the journals."""
    files = [path for path in folder.glob("journal/*/*") if path.name != LEASE]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.first
def test_a_second_start_is_refused_by_name_and_changes_nothing(start: Start) -> None:
    first = start("first")
    assert first.answer() == "begun at 0"
    assert first.train(4) == "at 4"
    before = content(first.folder)
    code, error = start("second").end()
    assert code == 1
    assert error.startswith("checkpoint_io.errors.LeaseError: ")
    assert "is in use by run 'first' (" in error
    assert f" in process {first.process.pid} on " in error
    assert 'start it with on_conflict="wait" or "take_over"' in error
    assert content(first.folder) == before
    assert first.train(1) == "at 5"
    assert first.end() == (0, "")
    assert [row["step"] for row in read_jsonl(first.folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    after = start("second")
    assert after.answer() == "begun at 5"


def test_a_start_may_wait_for_the_end_of_the_other_and_resumes_it(start: Start) -> None:
    first = start("first")
    assert first.answer() == "begun at 0"
    second = start("second", on_conflict="wait")
    assert "waiting for the end of run 'first'" in second.process.stderr.readline()
    assert first.train(4) == "at 4"
    assert first.end() == (0, "")
    assert second.answer() == "begun at 4"


def test_who_waits_for_one_folder_holds_no_other(start: Start, tmp_path: Path) -> None:
    """Two that wait may else hold one folder each, for ever."""
    runs = tmp_path / "runs"
    first = rival(runs / "checkpoints")
    job = start("waits", on_conflict="wait")
    assert f"{runs}/checkpoints: waiting for the end of" in job.process.stderr.readline()
    assert holder(runs) is None
    second = rival(runs)
    first.communicate()
    assert f"{runs}: waiting for the end of process {second.pid}" in job.process.stderr.readline()
    assert holder(runs / "checkpoints") is None
    second.communicate()
    assert job.answer() == "begun at 0"
    assert holder(runs).run_name == holder(runs / "checkpoints").run_name == "waits"


class Clock:
    """A clock that a wait moves on."""

    def __init__(self, at: dict[int, Callable[[], Any]]) -> None:
        self.now, self.at = 0.0, at

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [moment for moment in self.at if moment <= self.now]:
            self.at.pop(moment)()


def test_who_waits_says_so_at_first_and_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = rival(tmp_path)
    clock = Clock({150: process.communicate})
    monkeypatch.setattr(folder_leases, "time", clock)
    leases, run = FolderLeases("wait"), Accelerator(cpu=True).loop.run
    leases.hold([(str(tmp_path), None)], run)
    leases.release()
    waiting = f"{tmp_path}: waiting for the end of process {process.pid} on "
    told = [line.partition("waiting")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line.partition(", for ")[2] for line in told] == ["", "1 min so far", "2 min so far"]
    assert all(waiting.endswith(f"waiting{line.partition(' on ')[0]} on ") for line in told)
    process = rival(tmp_path)
    clock.at[151] = process.communicate
    leases.hold([(str(tmp_path), None)], run)
    assert waiting.partition(" process")[0] in capsys.readouterr().err
    leases.release()


def test_nobody_waits_in_its_middle_for_who_may_wait_for_it(tmp_path: Path) -> None:
    leases, run = FolderLeases("wait"), Accelerator(cpu=True).loop.run
    leases.hold([(str(tmp_path / "b"), None)], run)
    process = rival(tmp_path / "a")
    with pytest.raises(
        LeaseError, match=f"/a is in use by process {process.pid} .* may wait for .*/b"
    ):
        leases.hold([(str(tmp_path / "a"), None)], run)
    process.communicate()
    leases.hold([(str(tmp_path / "a"), None)], run)
    leases.release()


def test_a_refusal_keeps_nothing(tmp_path: Path) -> None:
    leases, run = FolderLeases("refuse"), Accelerator(cpu=True).loop.run
    process = rival(tmp_path / "b")
    with pytest.raises(LeaseError):
        leases.hold([(str(tmp_path / name), None) for name in "ab"], run)
    assert holder(tmp_path / "a") is None
    process.communicate()


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that takes no files")
def test_where_no_lease_can_be_had_a_warning_says_so_once_and_accel_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "checkpoints"
    place.symlink_to("/sys/kernel/checkpoints")
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accel = Accelerator(cpu=True, project_config=config, log_with="jsonl")
        with accel.run("unguarded"):
            accel.log({"loss": 1.0})
    told = [str(warning.message) for warning in caught if "no lease" in str(warning.message)]
    assert len(told) == 1
    assert told[0].startswith(f"{place}: no lease can be had there")
    capsys.readouterr()
    assert main(["runs", str(tmp_path)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "unguarded: " in line]
    assert len(told) == 1
    assert f" had no lease in {place} (" in told[0]
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert str(place) in json.loads(capsys.readouterr().out)[0]["unguarded"]


@pytest.mark.parametrize("record", ["[1]", "{}"])
def test_a_damaged_record_is_told_before_anything_is_written(tmp_path: Path, record: str) -> None:
    (tmp_path / LEASE).write_text(record)
    accel = accelerator(tmp_path, log_with="jsonl")
    with pytest.raises(LeaseError, match=f"{tmp_path}/{LEASE} says .* it is damaged"):
        accel.run("digits").__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [LEASE]


def test_of_two_that_start_at_once_one_is_refused(start: Start) -> None:
    jobs = [start("first"), start("second")]
    answers = [job.answer() for job in jobs]
    assert sorted(answers) == ["", "begun at 0"]
    loser, winner = sorted(jobs, key=lambda job: answers[jobs.index(job)])
    assert "LeaseError" in loser.end()[1]
    assert winner.train(1) == "at 1"


@pytest.mark.first
def test_the_folder_of_a_killed_run_is_free_at_once(start: Start) -> None:
    first = start("first")
    assert first.answer() == "begun at 0"
    assert first.train(2) == "at 2"
    first.send(signal.SIGKILL)
    first.process.wait()
    assert start("second").answer() == "begun at 2"


@pytest.mark.parametrize("logs", [True, False])
def test_a_stopped_run_that_goes_on_after_a_takeover_writes_nothing(
    start: Start, logs: bool
) -> None:
    first = start("first", logs=logs)
    assert first.answer() == "begun at 0"
    assert first.train(3) == "at 3"
    first.send(signal.SIGSTOP)
    assert "LeaseError" in start("second", logs=logs).end()[1]  # it may go on any time
    second = start("second", on_conflict="take_over", logs=logs)
    assert second.answer() == "begun at 2"
    assert second.train(1) == "at 3"
    before = content(first.folder)
    first.ask(100)
    first.send(signal.SIGCONT)
    code, error = first.end()
    assert code == 1
    assert "runs was taken over by run 'second' (" in error or "checkpoints was taken over" in error
    assert "this process writes nothing more there, and ends" in error
    assert content(first.folder) == before
    assert second.train(1) == "at 4"
    assert second.end() == (0, "")
    names = [info.name for info in CheckpointFolder(first.folder / "checkpoints").list()]
    assert names == ["step-00000002", "step-00000004"]


def accelerator(folder: Path, *callbacks: Any, **options: Any) -> Accelerator:
    accel = Accelerator(
        cpu=True, project_config=ProjectConfiguration(folder), callbacks=callbacks, **options
    )
    accel.prepare(torch.nn.Linear(1, 1))
    return accel


def holder(folder: Path) -> Any:
    return Lease(folder).find_holder()


def test_accelerators_of_one_process_share_a_folder(tmp_path: Path) -> None:
    first, second = (accelerator(tmp_path, log_with="jsonl") for _ in range(2))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    third = accelerator(link, log_with="csv")
    with first.run("first"):
        with second.run("second"), third.run("third"):
            second.log({"loss": 1.0})
            third.log({"loss": 1.0})
        assert holder(tmp_path).pid == os.getpid()
        first.log({"loss": 1.0})
    assert holder(tmp_path) is None


def test_an_error_gives_the_folders_back(tmp_path: Path) -> None:
    accel = accelerator(tmp_path, Checkpoint(), log_with="jsonl")

    def fail() -> None:
        with accel.run("fails") as run:
            assert holder(tmp_path).run_name == "fails"
            assert holder(tmp_path / "checkpoints").run_id == run.run_id
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert holder(tmp_path) is holder(tmp_path / "checkpoints") is None


def test_a_resumed_run_holds_its_folder_by_its_own_id(tmp_path: Path) -> None:
    def start() -> tuple[str, str]:
        accel = accelerator(tmp_path, Checkpoint())
        with accel.run("again") as run:
            for _ in run.epochs(1):
                pass
            return run.run_id, holder(tmp_path / "checkpoints").run_id

    assert start() == start()


def test_a_loop_without_run_holds_its_folders_until_end_training(tmp_path: Path) -> None:
    accel = accelerator(tmp_path, log_with="jsonl")
    assert holder(tmp_path) is None
    accel.save_state()
    assert holder(tmp_path / "checkpoints") is None  # outside of a training, for the save alone
    accel.init_trackers("plain")
    assert holder(tmp_path).run_name == "plain"
    for _ in accel.prepare(torch.utils.data.DataLoader(range(2))):
        accel.save_state()
        assert holder(tmp_path / "checkpoints").run_name == "plain"
    accel.save_state(async_save=True)
    accel.end_training()
    assert holder(tmp_path) is holder(tmp_path / "checkpoints") is None


def test_an_accelerator_that_is_collected_holds_nothing(tmp_path: Path) -> None:
    import gc
    import threading

    accelerator(tmp_path).loop.leases.hold([(str(tmp_path), None)], Accelerator(cpu=True).loop.run)
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "leases' end":
            thread.join()
    assert holder(tmp_path) is None


def test_a_run_that_writes_nothing_that_could_mix_takes_nothing(tmp_path: Path) -> None:
    accel = accelerator(tmp_path, log_with="console")
    with accel.run("reads") as run:
        accel.log({"loss": 1.0})
        accel.save_state(tmp_path.with_name("elsewhere") / "best")
    assert run.global_step == 0
    # But that of its journal, which guards nothing: by it others see that the run lives.
    leases = [path for path in tmp_path.rglob(LEASE) if "journal" not in path.parts]
    assert leases == []


def rival(folder: Path, *options: str) -> subprocess.Popen[str]:
    """A process that takes a lease, and keeps it until its input is closed."""
    words = "lease.acquire(*sys.argv[2:]); print('held', flush=True); sys.stdin.read()"
    command = f"import sys, checkpoint_io; lease = checkpoint_io.Lease(sys.argv[1]); {words}"
    process: subprocess.Popen[str] = warm.Popen(
        [sys.executable, "-c", command, str(folder), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_path_inside_of_the_project_belongs_to_it(tmp_path: Path) -> None:
    accel = accelerator(tmp_path)
    beside = accel.save_state(tmp_path.with_name("beside"))
    process = rival(tmp_path)
    with pytest.raises(LeaseError, match="is in use by process"):
        accel.save_state(tmp_path / "best")
    assert not (tmp_path / "best").exists()
    assert accel.save_state(beside) == beside
    process.communicate()
    accel.save_state(tmp_path / "best")


def test_who_has_lost_a_folder_saves_nothing_more(tmp_path: Path) -> None:
    accel = accelerator(tmp_path)
    model = accel.models[0]
    with suppress(LeaseError), accel.run("loses"):  # the journal's end may meet it too
        accel.save_state()
        before = content(tmp_path)
        process = rival(tmp_path / "checkpoints", "take_over")
        time.sleep(0.3)  # what writes often looks once in a while
        for write in (
            lambda: accel.save_state(),
            lambda: accel.save_state(tmp_path.with_name("elsewhere")),
            lambda: accel.save_model(model, tmp_path / "model"),
            lambda: accel.save(model.state_dict(), tmp_path / "weights"),
        ):
            with pytest.raises(LeaseError, match="was taken over by process"):
                write()
    assert content(tmp_path) == before
    process.communicate()


def test_rows_of_a_lost_folder_are_not_written(tmp_path: Path) -> None:
    accel = accelerator(tmp_path, log_with=["jsonl", "csv", "tensorboard"])
    written: list[dict[str, bytes]] = []

    def train() -> None:
        with accel.run("loses"):
            accel.log({"loss": 1.0})
            assert accel.tracking.hub is not None
            accel.tracking.hub.flush()
            process = rival(tmp_path, "take_over")
            time.sleep(0.3)  # a look that is not older counts
            written.append({**content(tmp_path), **journals(tmp_path)})
            try:
                while True:
                    accel.log({"loss": 2.0})
                    time.sleep(0.02)
            finally:
                process.communicate()

    with pytest.raises(LeaseError, match="was taken over by process"):
        train()
    # No row, no mark, and no record of the end.
    assert written == [{**content(tmp_path), **journals(tmp_path)}]


def test_ckpt_leaves_a_folder_alone_that_is_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = CheckpointFolder(tmp_path / "ck")
    for step in range(3):
        folder.save(step, {}, metadata={"run_id": "a"})
    process = rival(tmp_path / "ck")
    there = content(tmp_path)
    actions: list[list[Any]] = [
        ["rm", folder.path(0), "--yes"],
        ["prune", folder.url, "--keep_last", 1],
    ]
    for action in actions:
        assert main(["ckpt", *map(str, action)]) == 1
        assert f"{process.pid} on " in (text := capsys.readouterr().err)
        assert "which is alive: end that run first, or add --force; nothing was changed" in text
        assert content(tmp_path) == there
    assert main(["ckpt", "prune", folder.url, "--keep_last", "1", "--dry_run"]) == 0
    process.communicate()
    (tmp_path / "ck" / LEASE).write_text("[1]")
    assert main(["ckpt", *map(str, actions[0])]) == 1
    assert "it is damaged" in (text := capsys.readouterr().err)
    assert "or add --force; nothing was changed" in text
    assert content(tmp_path) == there
    for action in actions:
        assert main(["ckpt", *map(str, action), "--force"]) == 0
        assert content(tmp_path) != there
        there = content(tmp_path)


def test_an_unknown_way_to_act_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"on_conflict='takeover' .* Did you mean 'take_over'\?"):
        ProjectConfiguration(on_conflict="takeover")  # type: ignore[arg-type]


@pytest.mark.s3
def test_a_folder_in_a_store_is_held_and_given_back(s3_options: dict[str, Any]) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    saver = Checkpoint(url, storage_options=s3_options)
    lease = Lease(url, storage_options=s3_options)
    accel = Accelerator(cpu=True, callbacks=[saver])
    accel.prepare(torch.nn.Linear(1, 1))
    with accel.run("stored") as run:
        found = lease.find_holder()
        assert found is not None
        assert (found.run_name, found.run_id) == ("stored", run.run_id)
        for _ in run.epochs(1):
            pass
    assert saver.last_path == f"{url}/step-00000000"
    assert lease.find_holder() is None


def test_the_launch_says_what_a_script_leaves_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start("first")
    assert first.answer() == "begun at 0"
    monkeypatch.setenv("ACCEL_ON_CONFLICT", "take_over")
    assert "is in use by run 'first'" in start("second", on_conflict="refuse").end()[1]
    assert start("third").answer() == "begun at 0"
    accel = Accelerator(cpu=True)
    assert accel.project_configuration.on_conflict == "take_over"
    assert accel.config.origins["on_conflict"] == "environment variable ACCEL_ON_CONFLICT"


def test_without_a_word_a_start_is_refused() -> None:
    assert Accelerator(cpu=True).project_configuration.on_conflict == "refuse"
