"""One process fails or differs: the others learn of it at once, and the group goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, EarlyStopping
from loggers import Tracker
from tests.support import warm
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


class FailsOn(Callback):
    """Raises in one of its methods, on one process, as often as told."""

    def __init__(self, where: str, rank: int, error: BaseException) -> None:
        self.where, self.rank, self.error = where, rank, error
        self.armed = True

    def _maybe(self, where: str, run_rank: int) -> None:
        if self.armed and where == self.where and run_rank == self.rank:
            raise self.error

    def on_save_checkpoint(self, run, model, checkpoint):
        self._maybe("on_save_checkpoint", run.accelerator.process_index)

    def on_load_checkpoint(self, run, model, checkpoint):
        self._maybe("on_load_checkpoint", run.accelerator.process_index)

    def state_dict(self):
        self._maybe("state_dict", int(os.environ["RANK"]))
        return {"here": 1}

    def load_state_dict(self, state_dict):
        self._maybe("load_state_dict", int(os.environ["RANK"]))


def outcome(action, *args) -> str:
    """The name of what it raises, interrupts included, or "ok"."""
    try:
        action(*args)
    except BaseException as error:
        return type(error).__name__
    return "ok"


def save_with_a_failure(folder: str, where: str, rank: int) -> tuple[str, bool, str]:
    failing = FailsOn(where, rank, OSError("no token"))
    accel = accelerator(callbacks=[failing])
    accel.prepare(torch.nn.Linear(1, 1))
    first = outcome(accel.save_state, folder)
    accel.wait_for_everyone()
    committed = os.path.exists(f"{folder}/manifest.json")
    accel.wait_for_everyone()
    failing.armed = False
    return first, committed, outcome(accel.save_state, folder)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("where", ["on_save_checkpoint", "state_dict"])
def test_a_save_that_fails_on_one_process_fails_on_all_and_can_be_repeated(
    pool, tmp_path, where, rank
):
    outcomes = pool.run(save_with_a_failure, str(tmp_path / "saved"), where, rank)
    assert outcomes[rank] == ("OSError", False, "ok")
    assert outcomes[1 - rank] == ("RemoteError", False, "ok")


def load_with_a_failure(folder: str, where: str, interrupt: bool) -> tuple[str, str]:
    error: BaseException = KeyboardInterrupt() if interrupt else OSError("no memory")
    failing = FailsOn(where, 0, error)
    accel = accelerator(callbacks=[failing])
    accel.prepare(torch.nn.Linear(1, 1))
    accel.save_state(folder)
    first = outcome(accel.load_state, folder)
    failing.armed = False
    return first, outcome(accel.load_state, folder)


@pytest.mark.parametrize("where", ["on_load_checkpoint", "load_state_dict"])
@pytest.mark.parametrize("interrupt", [False, True], ids=["an error", "an interrupt"])
def test_a_load_that_fails_on_one_process_fails_on_all(pool, tmp_path, where, interrupt):
    own = "KeyboardInterrupt" if interrupt else "OSError"
    outcomes = pool.run(load_with_a_failure, str(tmp_path / "saved"), where, interrupt)
    assert outcomes == [(own, "ok"), ("RemoteError", "ok")]


class NoServer(Tracker):
    name = "no-server"

    def start(self, run):
        raise ConnectionError("no route to the tracker")

    def log(self, scalars, step): ...

    def finish(self, status="success"): ...


def enter_a_run_with_a_strict_tracker(folder: str) -> str:
    accel = accelerator(log_with=NoServer(), strict_trackers=True, project_dir=folder)
    return outcome(accel.run("strict").__enter__)


def test_a_strict_tracker_that_cannot_start_ends_the_run_everywhere(pool, tmp_path):
    outcomes = pool.run(enter_a_run_with_a_strict_tracker, str(tmp_path))
    assert outcomes == ["ConnectionError", "RemoteError"]


def callbacks_on_the_main_process_only(kind: str, how: str) -> str:
    chosen = {"stopping": EarlyStopping("loss"), "saving": Checkpoint("c")}[kind]
    first = int(os.environ["RANK"]) == 0
    accel = accelerator(callbacks=[chosen] if first else [])
    if how == "run":
        return outcome(accel.run("other").__enter__)
    return outcome(accel.prepare, torch.utils.data.DataLoader(range(4)))


@pytest.mark.parametrize("kind", ["stopping", "saving"])
@pytest.mark.parametrize("how", ["run", "prepare"])
def test_a_callback_that_meets_the_others_must_be_on_all_processes(pool, kind, how):
    assert pool.run(callbacks_on_the_main_process_only, kind, how) == ["ValueError"] * 2


def a_callback_of_one_process() -> int:
    class Counts(Callback):
        seen = 0

        def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
            self.seen += 1

    counts = Counts()
    accel = accelerator(callbacks=[counts] if int(os.environ["RANK"]) == 0 else [])
    for _ in accel.prepare(torch.utils.data.DataLoader(range(4))):
        pass
    return counts.seen


def test_a_callback_that_only_watches_may_be_on_one_process(pool):
    assert pool.run(a_callback_of_one_process) == [2, 0]


def a_folder_shared_with_the_user(folder: str) -> list[str]:
    """A script's own checkpoint in the callback's folder, with a metadata entry named score."""
    accel = accelerator(callbacks=[Checkpoint(folder, monitor="val", keep_last=1)])
    data = accel.prepare(torch.utils.data.DataLoader(range(4)))
    with accel.run("shared", resume=False) as run:
        for epoch in run.epochs(3):
            for _ in data:
                run.global_step += 1
            accel.log({"val": 1.0 / (epoch + 1)})
            accel.save_state(f"{folder}/mine-{epoch}", metadata={"score": 0.9})
    return [entry.name for entry in checkpoint_io.CheckpointFolder(folder).list()]


def test_retention_understands_no_score_but_its_own(pool, tmp_path):
    first, second = pool.run(a_folder_shared_with_the_user, str(tmp_path))
    assert first == second
    assert "step-00000006" in first


def ids_of_a_plain_loop() -> str:
    accel = accelerator()
    accel.prepare(torch.nn.Linear(1, 1))
    return accel.current_run.run_id


def test_a_plain_loop_has_one_run_id(pool):
    first, second = pool.run(ids_of_a_plain_loop)
    assert first == second


def seen_with_generators_of_their_own() -> list[int]:
    accel = accelerator()
    generator = torch.Generator().manual_seed(accel.process_index)
    data = torch.utils.data.DataLoader(range(8), 2, shuffle=True, generator=generator)
    return accel.gather(torch.cat(list(accel.prepare(data)))).tolist()


def test_a_generator_seeded_by_rank_does_not_tear_the_order_apart(pool):
    first, second = pool.run(seen_with_generators_of_their_own)
    assert first == second
    assert sorted(first) == list(range(8))


OWN_GROUP = """
import sys
import torch.distributed as dist
from accel_callbacks import Accelerator, is_main_process

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
seen = [is_main_process()]
accel = Accelerator(cpu=True)
seen += [is_main_process(), accel.num_processes]
accel.end_training()
seen += [is_main_process(), accel.num_processes, dist.is_initialized()]
print(seen)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_group_that_the_script_made_is_known_before_and_after(tmp_path):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    processes = [
        warm.Popen(
            [sys.executable, "-c", OWN_GROUP, str(tmp_path / "store"), str(rank)],
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate()[0].strip() for process in processes]
    assert printed == ["[True, True, 2, True, 2, True]", "[False, False, 2, False, 2, True]"]
