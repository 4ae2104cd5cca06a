"""Saving in the background with two processes: one outcome for all, at one step, and no hang."""

from __future__ import annotations

import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import checkpoint_io
from accel_callbacks import Accelerator, Callback, LocalSGD
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.checkpoint.async_save import SaveCallbacks
from tests.support import warm
from tests.support.bound import BOUND

SUPPORT = Path(__file__).resolve().parents[2] / "support"
sys.path.insert(0, str(SUPPORT))

from gated_files import Gate  # noqa: E402

pytestmark = pytest.mark.distributed

SLOW = pytest.mark.slow


class Notes(Callback):
    def __init__(self):
        self.saved = []

    def on_checkpoint_saved(self, run, model, path):
        self.saved.append((run.global_step, path.rsplit("/", 1)[-1]))


class Job:
    """A model that is large enough to be spread over the processes, and eight batches for each."""

    def __init__(self, folder: str, *callbacks: Callback, **options):
        self.notes = Notes()
        self.accel = Accelerator(
            cpu=True, timeout=BOUND, callbacks=[self.notes, *callbacks], **options
        )
        self.rank = self.accel.process_index
        self.gate = Gate(folder)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
        self.model, self.optimizer, self.data = self.accel.prepare(
            model,
            torch.optim.Adam(model.parameters(), lr=0.1),
            torch.utils.data.DataLoader(torch.ones(16, 200), 1),
        )

    def step(self, batch: torch.Tensor) -> None:
        self.accel.backward(self.model(batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        bare = self.accel.unwrap_model(self.model)
        return {name: value.clone() for name, value in bare.state_dict().items()}

    def save(self, name: str, callbacks: SaveCallbacks | None = None, **options) -> str:
        options = {"async_save": True, "storage_options": self.gate.options, **options}
        path = f"{self.gate.root}/{name}"
        return self.accel.checkpointer.write(path, callbacks=callbacks, **options)

    def read(self, name: str) -> dict:
        path = f"{self.gate.root}/{name}"
        return checkpoint_io.load(path, storage_options=self.gate.options).state


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def outcome(action) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "ok", ""


# --- what is saved --------------------------------------------------------------------------------


def save_while_training(folder: str) -> dict:
    job = Job(folder)
    for index, batch in enumerate(job.data):
        job.step(batch)
        if index == 1:
            if job.rank == 0:
                job.gate.shut()
            job.accel.wait_for_everyone()
            wanted = job.weights()
            job.save("c")
    job.accel.wait_for_everyone()
    before = list(job.notes.saved)
    job.gate.open()
    job.accel.wait_for_save()
    manifest = checkpoint_io.read_manifest(f"{job.gate.root}/c", storage_options=job.gate.options)
    ranks = {
        key: {manifest.files[chunk.file].rank for chunk in entry.chunks}
        for key, entry in manifest.tensors.items()
    }
    state = job.read("c")
    return {
        "bitwise": same(state["models"]["0"], wanted),
        "went on": not same(job.weights(), wanted),
        "before": before,
        "saved": job.notes.saved,
        "models": set().union(*(r for key, r in ranks.items() if key.startswith("models/"))),
        "optimizers": set().union(*(r for key, r in ranks.items() if key.startswith("optim"))),
    }


@pytest.mark.first
def test_the_checkpoint_is_the_state_at_the_call_and_all_processes_write_it(pool, tmp_path):
    for seen in pool.run(save_while_training, str(tmp_path)):
        assert seen["bitwise"]
        assert seen["went on"]
        assert (seen["before"], seen["saved"]) == ([], [(8, "c")])
        assert seen["models"] == seen["optimizers"] == {0, 1}


def save_what_differs(folder: str, how: str) -> bool:
    job = Job(folder)

    class Edits(Callback):
        def on_save_checkpoint(self, run, model, checkpoint):
            if run.is_global_zero:
                weights = checkpoint["models"]["0"]
                checkpoint["models"]["0"] = {k: torch.full_like(v, 7) for k, v in weights.items()}

    bare = job.accel.unwrap_model(job.model)
    if how == "buffer":
        bare.register_buffer("table", torch.full((200, 200), float(job.rank)))
    if how == "local sgd":
        with LocalSGD(job.accel, job.model, local_sgd_steps=100):
            for _, batch in zip(range(3), job.data, strict=False):
                job.step(batch * (1 + job.rank))
                job.weights()
    if how == "hook" and job.rank == 0:
        job.accel.loop.dispatch.add(Edits())
    wanted = [job.accel.optimizers[0].state_dict(), job.weights()]
    job.save("c", async_save=False)
    if job.rank:
        return True
    state = job.read("c")
    if how == "hook":
        return all(bool((value == 7).all()) for value in state["models"]["0"].values())
    moments = [one["exp_avg"] for one in wanted[0]["state"].values()]
    saved = [one["exp_avg"] for one in state["optimizers"]["0"]["state"].values()]
    return same(state["models"]["0"], wanted[1]) and all(map(torch.equal, moments, saved))


@pytest.mark.parametrize("how", ["buffer", "local sgd", "hook"])
def test_where_processes_differ_it_is_the_main_one_that_is_saved(pool, tmp_path, how):
    assert pool.run(save_what_differs, str(tmp_path), how) == [True, True]


# --- one outcome, at one step ---------------------------------------------------------------------


def end_at_different_times(folder: str) -> tuple:
    """The thread of process 0 ends some steps after that of process 1."""
    job, tidied = Job(folder), Path(folder, "tidied")
    tidy = (lambda: wait_for(tidied)) if job.rank == 0 else None
    for index, batch in enumerate(job.data):
        job.step(batch)
        if index == 1:
            job.save("c", SaveCallbacks(cleanup=tidy))
        if index == 3 and job.rank == 1:
            job.accel.loop.saves._saver._handle.join()
        if index == 5 and job.rank == 0:
            tidied.touch()
            job.accel.loop.saves._saver._handle.join()
    return job.notes.saved


def test_it_is_told_to_all_processes_at_the_same_step(pool, tmp_path):
    assert pool.run(end_at_different_times, str(tmp_path)) == [[(6, "c")]] * 2


def fail_on_one(folder: str, bad: int, ask: str) -> tuple:
    job = Job(folder)
    options = {"gate": f"{folder}/gate-{job.rank}"}
    if job.rank == bad:
        Path(f"{folder}/gate-{bad}.fails").touch()

    def train() -> None:
        for index, batch in enumerate(job.data):
            job.step(batch)
            if index == 2:
                job.save("bad", storage_options=options)
                job.accel.loop.saves._saver._handle.join()
                if ask == "save":
                    job.save("next", storage_options=options)
                if ask == "wait":
                    job.accel.wait_for_save()

    result = (*outcome(train), job.accel.current_run.global_step, job.accel.loop.saves.pending)
    Path(f"{folder}/gate-{bad}.fails").unlink(missing_ok=True)
    job.accel.wait_for_everyone()
    job.save("good")
    job.accel.wait_for_save()
    return (*result, same(job.read("good")["models"]["0"], job.weights()), job.notes.saved)


@pytest.mark.first
@pytest.mark.parametrize(("bad", "ask"), [(0, "step"), (1, "step"), (1, "save"), (0, "wait")])
def test_an_error_on_one_process_is_raised_on_all_at_the_same_step(pool, tmp_path, bad, ask):
    for kind, text, step, pending, whole, saved in pool.run(fail_on_one, str(tmp_path), bad, ask):
        assert (kind, step, pending) == ("CheckpointError", 3, False)
        assert f"rank {bad}: OSError: the disk is on fire" in text
        assert whole
        assert saved == [(3, "good")]
    left = {path.name for path in tmp_path.glob("*/*")}
    assert not (tmp_path / "bad").exists() or not list((tmp_path / "bad").iterdir())
    assert "manifest.json" in left


def fail_to_copy_on_one(folder: str) -> tuple:
    job = Job(folder)
    job.save("a")
    job.accel.wait_for_save()
    if job.rank == 1:
        job.accel.loop.saves._saver._buffers.fill = lambda tensors: 1 / 0
    first = outcome(lambda: job.save("b"))
    if job.rank == 1:
        del job.accel.loop.saves._saver._buffers.fill
    job.save("c")
    job.accel.wait_for_save()
    return (*first, [name for _, name in job.notes.saved])


def test_no_room_for_the_copies_of_one_process_is_an_error_on_all(pool, tmp_path):
    for kind, text, saved in pool.run(fail_to_copy_on_one, str(tmp_path)):
        assert kind == "CheckpointError"
        assert "rank 1: ZeroDivisionError" in text
        assert saved == ["a", "c"]
    assert not (tmp_path / "b").exists()


def skip_where_one_is_busy(folder: str) -> list:
    job, tidied = Job(folder), Path(folder, "tidied")
    job.save("a", SaveCallbacks(cleanup=(lambda: wait_for(tidied)) if job.rank == 0 else None))
    if job.rank == 1:
        job.accel.loop.saves._saver._handle.join()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skipped = job.save("b", when_busy="skip")
    job.accel.wait_for_everyone()
    tidied.touch()
    return [skipped, job.save("c"), job.accel.wait_for_save(), job.notes.saved]


def test_a_save_is_skipped_on_all_processes_or_on_none(pool, tmp_path):
    for skipped, path, _, saved in pool.run(skip_where_one_is_busy, str(tmp_path)):
        assert (skipped, path) == ("", f"gated://{tmp_path}/c")
        assert saved == [(0, "a"), (0, "c")]


# --- groups ---------------------------------------------------------------------------------------


def group_of_a_save_that_waits(folder: str) -> tuple:
    job, seen = Job(folder), []
    run = checkpoint_io.SaveJob.run

    def spy(self, group=None, **options):
        raw = group._group
        backend = raw._get_backend(torch.device("cpu"))
        seen.append((raw is dist.group.WORLD, dist.get_backend(raw), backend.options._timeout))
        return run(self, group, **options)

    checkpoint_io.SaveJob.run = spy
    try:
        job.save("c", async_save=False)
    finally:
        checkpoint_io.SaveJob.run = run
    return seen


def test_a_save_that_waits_meets_in_a_group_that_waits_long(pool, tmp_path):
    for seen in pool.run(group_of_a_save_that_waits, str(tmp_path)):
        assert seen == [(False, "gloo", timedelta(hours=2))]


def many_accelerators(folder: str) -> list[int]:
    counts = []
    for number in range(4):
        job = Job(f"{folder}")
        job.save(f"a{number}", async_save=False)
        job.save(f"b{number}")
        job.accel.wait_for_save()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_groups_are_used_again_by_the_next_accelerator(pool, tmp_path):
    for counts in pool.run(many_accelerators, str(tmp_path)):
        assert len(set(counts)) == 1


def two_at_once(folder: str) -> list:
    first, second = Job(folder), Job(folder)
    first.gate.shut()
    first.accel.wait_for_everyone()
    for batch in first.data:
        first.step(batch)
    first.save("a")
    second.save("b")
    first.accel.wait_for_everyone()
    first.gate.open()
    second.accel.wait_for_save()
    first.accel.wait_for_save()
    return [
        first.notes.saved,
        second.notes.saved,
        same(first.read("a")["models"]["0"], first.weights()),
        same(second.read("b")["models"]["0"], second.weights()),
    ]


def test_two_accelerators_save_side_by_side(pool, tmp_path):
    assert pool.run(two_at_once, str(tmp_path)) == [[[(8, "a")], [(0, "b")], True, True]] * 2


# --- the end of a run -----------------------------------------------------------------------------


def fail_with_a_save_under_way(folder: str, kind: str) -> tuple:
    job, failed = Job(folder), Path(folder, "failed")

    def train() -> None:
        with job.accel.run("demo", resume=False):
            for index, batch in enumerate(job.data):
                job.step(batch)
                if index == 2:
                    if job.rank == 0:
                        job.gate.shut()
                    job.accel.wait_for_everyone()
                    job.save("c")
                if index == 4 and job.rank == 1:
                    failed.touch()
                    raise {"error": ValueError, "interrupt": KeyboardInterrupt}[kind]("mine")

    class Opens(Callback):
        def on_exception(self, run, model, exception):
            wait_for(failed)
            job.gate.open()

    job.accel.loop.dispatch.add(Opens())
    try:
        train()
        raised = "nothing"
    except BaseException as error:
        raised = type(error).__name__
    path = f"{job.gate.root}/c"
    step = checkpoint_io.load(path, storage_options=job.gate.options).state["run"]["global_step"]
    again = Job(folder)  # in a new group
    again.save("d")
    again.accel.wait_for_save()
    return raised, step, job.notes.saved, again.notes.saved


@pytest.mark.parametrize("kind", ["error", "interrupt"])
def test_a_save_that_is_under_way_when_one_process_fails_still_ends_on_all(pool, tmp_path, kind):
    first, second = pool.run(fail_with_a_save_under_way, str(tmp_path), kind)
    assert first == ("RemoteError", 3, [], [(0, "d")])
    own = {"error": "ValueError", "interrupt": "KeyboardInterrupt"}[kind]
    assert second == (own, 3, [], [(0, "d")])


def fail_where_the_other_waits_for_the_save(folder: str) -> str:
    """Process 0 waits for the outcome of the save, and process 1 does not come."""
    job = Job(folder)

    def train() -> None:
        with job.accel.run("demo", resume=False):
            job.save("c")
            if job.rank == 1:
                raise ValueError("mine")
            job.accel.wait_for_save()

    return outcome(train)[0]


def test_a_process_that_waits_for_a_save_learns_that_another_has_failed(pool, tmp_path):
    kinds = pool.run(fail_where_the_other_waits_for_the_save, str(tmp_path))
    assert kinds == ["RemoteError", "ValueError"]
    assert pool.run(save_while_training, str(tmp_path / "next"))[0]["bitwise"]


def callback_run(folder: str, epochs: int) -> tuple:
    gate = Gate(folder)
    saver = Checkpoint(
        f"{gate.root}/run", every_n_steps=3, keep_last=2, storage_options=gate.options
    )
    job = Job(folder, saver)
    with job.accel.run("demo") as run:
        for _ in run.epochs(epochs):
            for batch in job.data:
                job.step(batch)
    names = [name for _, name in job.notes.saved]
    return run.resumed_from, saver.last_path, names


@pytest.mark.first
def test_the_callback_saves_in_the_background_on_all_processes_and_resumes(pool, tmp_path):
    path = f"gated://{tmp_path}/run/step-"
    for resumed, last, names in pool.run(callback_run, str(tmp_path), 1):
        assert (resumed, last) == (None, f"{path}00000008")
        assert names == ["step-00000003", "step-00000006", "step-00000008"]
    for resumed, last, _ in pool.run(callback_run, str(tmp_path), 2):
        assert (resumed, last) == (f"{path}00000008", f"{path}00000016")
    folders = sorted(entry.name for entry in (tmp_path / "run").glob("[!.]*"))
    assert folders == ["step-00000008", "step-00000015", "step-00000016"]


def probe_fails(folder: str) -> tuple:
    job = Job(folder, Checkpoint("gated://" + folder, storage_options=Gate(folder).options))
    if job.rank == 0:
        job.gate.break_writes()
    return outcome(job.accel.run("demo").__enter__)


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step_by_all(pool, tmp_path):
    first, second = pool.run(probe_fails, str(tmp_path))
    assert "on fire" in first[1]
    assert second[0] == "RemoteError"
    assert "on fire" in second[1]


# --- checkpoint_io alone --------------------------------------------------------------------------


def saver_alone(folder: str, bad: int) -> list:
    Accelerator(cpu=True, timeout=BOUND)  # joins the group
    gate, rank = Gate(folder), dist.get_rank()
    options = {"gate": f"{folder}/gate-{rank}"}
    saver = checkpoint_io.BackgroundSaver(group=checkpoint_io.TorchGroup())
    weight = torch.full((50_000,), 1.0)

    def save(name: str):
        return saver.save(
            f"{gate.root}/{name}",
            {"w": weight},
            local_state={"rank": rank},
            storage_options=options,
        )

    save("a")
    weight.fill_(2.0)
    saver.wait()
    if rank == bad:
        Path(f"{folder}/gate-{bad}.fails").touch()
    save("b")
    failed = outcome(saver.close)
    Path(f"{folder}/gate-{bad}.fails").unlink(missing_ok=True)
    dist.barrier()
    save("b")
    saver.close()
    found = [
        checkpoint_io.load(f"{gate.root}/{name}", rank=rank, storage_options=options)
        for name in "ab"
    ]
    return [failed, [(one.state["w"][0].item(), one.local_state["rank"]) for one in found]]


@pytest.mark.parametrize("bad", [0, 1])
def test_the_saver_alone_raises_on_all_what_failed_on_one(pool, tmp_path, bad):
    for rank, (failed, found) in enumerate(pool.run(saver_alone, str(tmp_path), bad)):
        assert failed[0] == "CheckpointError"
        assert f"rank {bad}: OSError: the disk is on fire" in failed[1]
        assert found == [(1.0, rank), (2.0, rank)]


def fail_afterwards(folder: str) -> tuple:
    Accelerator(cpu=True, timeout=BOUND)
    group = checkpoint_io.TorchGroup()
    saver = checkpoint_io.BackgroundSaver(group=group)
    job = checkpoint_io.prepare_save(
        f"{folder}/c", {"n": 1}, next_generation=lambda old: 1, group=group
    )
    saver.submit(job, afterwards=(lambda: 1 / 0) if group.rank == 1 else None)
    return (*outcome(saver.wait), *outcome(saver.close))


def test_what_fails_afterwards_on_one_is_an_error_on_all(pool, tmp_path):
    first, second = pool.run(fail_afterwards, str(tmp_path))
    assert first[0] == "CheckpointError"
    assert "rank 1: ZeroDivisionError" in first[1]
    assert second[0] == "ZeroDivisionError"
    assert first[2:] == second[2:] == ("ok", "")


def refused_groups() -> list:
    class Bare:
        rank, world_size = 0, 2

    Accelerator(cpu=True, timeout=BOUND)
    part = dist.new_group([0])
    refused = [outcome(lambda: checkpoint_io.BackgroundSaver(group=Bare()))]
    if dist.get_rank() == 0:
        group = checkpoint_io.TorchGroup(part)
        refused.append(outcome(checkpoint_io.BackgroundSaver(group=group).close))
    return refused


def test_a_group_without_one_of_its_own_for_the_thread_is_refused(pool):
    first, second = pool.run(refused_groups)
    assert first[0][0] == second[0][0] == "TypeError"
    assert "beside()" in first[0][1]
    assert first[1] == ("ok", "")  # a group of one needs none


def saver_in_a_part(folder: str) -> object:
    Accelerator(cpu=True, timeout=BOUND)
    parts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    saver = checkpoint_io.BackgroundSaver(group=checkpoint_io.TorchGroup(parts[rank % 2]))
    if rank % 2 == 1:  # the others need not come
        for value in (1.0, 2.0):
            saver.save(f"{folder}/c", {"w": torch.full((3,), value)}, local_state={"rank": rank})
        saver.close()
        return checkpoint_io.load(f"{folder}/c", rank=rank // 2).local_state["rank"]
    return None


@pytest.mark.slow
def test_a_part_of_the_processes_saves_without_the_others(pool_of_4, tmp_path):
    assert pool_of_4.run(saver_in_a_part, str(tmp_path)) == [None, 1, None, 3]


# --- processes of their own -----------------------------------------------------------------------

ENDS = """
import sys, threading, torch
sys.path.insert(0, sys.argv[1])
from accel_callbacks import Accelerator
from gated_files import Gate
accel = Accelerator(cpu=True)
gate = Gate(sys.argv[2])
gate.shut()
accel.wait_for_everyone()
model = accel.prepare(torch.nn.Linear(200, 200))
accel.save_state(gate.root + "/c", storage_options=gate.options, async_save=True)
with torch.no_grad():
    model.module.weight.zero_()
accel.wait_for_everyone()
timer = threading.Timer(0.5, gate.open)
timer.daemon = True
timer.start()
if sys.argv[3] == "fails":
    gate.break_writes()
if sys.argv[3] == "exits":
    sys.exit(0)
"""


@pytest.mark.parametrize(
    "how", ["falls", pytest.param("exits", marks=SLOW), pytest.param("fails", marks=SLOW)]
)
def test_processes_end_after_their_save_and_with_its_error(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    command = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--cpu"]
    done = warm.run(
        [*command, "--num_processes", "2", str(script), str(SUPPORT), str(tmp_path), how],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        warm_children=True,
        destructors=True,
    )
    gate = Gate(tmp_path)
    if how == "fails":
        assert done.returncode != 0
        assert "the disk is on fire" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    state = checkpoint_io.load(f"{gate.root}/c", storage_options=gate.options).state
    assert bool((state["models"]["0"]["weight"] != 0).any())
