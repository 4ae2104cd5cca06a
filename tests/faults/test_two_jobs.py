"""Two jobs at one path, a reader during saves, a prune during reads: no mixture, no torn read."""

from __future__ import annotations

import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faultkit import victims as do
from faultkit.forking import ForkServer, Victim
from faultkit.litter import litter, litter_s3
from faultkit.states import whole

from checkpoint_io import (
    CheckpointConflictError,
    CheckpointFolder,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    keep_last,
    load,
)

NUMEL = 100_000
LONG = [pytest.mark.slow]
TORN = (CheckpointNotFoundError, CorruptCheckpointError)


def tally(jobs: list[Victim]) -> Counter[str]:
    """Wait for jobs that save in rounds; count what became of each save."""
    counts: Counter[str] = Counter()
    for job in jobs:
        kind, outcomes = job.result()
        assert kind == "returned", f"{kind}: {outcomes}"
        counts.update(outcomes)
    return counts


def read_while(alive: Callable[[], bool], url: str, options: Any = None) -> list[tuple[int, int]]:
    """Load again and again; what is loaded is whole. Return what was found, repeats left out."""
    found: list[tuple[int, int]] = []
    while True:
        last = not alive()
        try:
            now = whole(load(url, storage_options=options))
        except CorruptCheckpointError as error:
            # Saves that follow each other faster than a load: it says so, and gives nothing torn.
            if last or "a newer save has replaced this checkpoint" not in str(error):
                raise
            continue
        found += [now] if found[-1:] != [now] else []
        if last:
            return found


def check_jobs(counts: Counter[str], found: list[tuple[int, int]], rounds: int) -> None:
    """Each save was made in the end, refused only for the other job's sake, each job's in order."""
    # A refusal takes far less time than a save, so how many there are says nothing.
    assert set(counts) <= {"ok", "CheckpointConflictError"}, counts
    assert counts["ok"] == 2 * rounds
    for job in (0, 1):
        steps = [step for step, j in found if j == job]
        assert steps == sorted(steps), f"job {job} went back: {steps}"
    assert found[-1][0] == rounds


# --- two jobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=LONG)])
def test_two_jobs_on_a_local_disk(victims: ForkServer, tmp_path: Path, rounds: int) -> None:
    place = tmp_path / "c"
    victims.run(do.once, str(place), 0)
    jobs = [victims.spawn(do.save_rounds, str(place), job, rounds, NUMEL) for job in (0, 1)]
    found = read_while(lambda: any(do_not_end(jobs)), str(place))
    check_jobs(tally(jobs), found, rounds)
    victims.run(do.once, str(place), rounds + 1)
    assert litter(place) == set()


@pytest.mark.s3
@pytest.mark.parametrize("rounds", [6, pytest.param(60, marks=LONG)])
def test_two_jobs_on_s3(victims: ForkServer, s3: Any, rounds: int) -> None:
    prefix = uuid.uuid4().hex
    url = s3.url(prefix)
    victims.run(do.once, url, 0, s3.options)
    jobs = [victims.spawn(do.save_rounds, url, job, rounds, NUMEL, s3.options) for job in (0, 1)]
    found = read_while(lambda: any(do_not_end(jobs)), url, s3.options)
    check_jobs(tally(jobs), found, rounds)
    victims.run(do.once, url, rounds + 1, s3.options)
    assert litter_s3(s3, prefix) == set()


def do_not_end(jobs: list[Victim]) -> list[bool]:
    """Say of each job whether it is still at work."""
    return [job.works() for job in jobs]


@pytest.mark.parametrize("rounds", [15, pytest.param(200, marks=LONG)])
def test_two_threads_in_memory(rounds: int) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    do.save_step(url, 0, numel=NUMEL)
    results: list[list[str]] = [[], []]

    def work(job: int) -> None:
        results[job] += do.save_rounds(None, url, job, rounds, NUMEL)

    threads = [threading.Thread(target=work, args=(job,)) for job in (0, 1)]
    for thread in threads:
        thread.start()
    found = read_while(lambda: any(thread.is_alive() for thread in threads), url)
    for thread in threads:
        thread.join()
    check_jobs(Counter(results[0] + results[1]), found, rounds)


def test_the_loser_is_told_who_is_in_the_way(victims: ForkServer, tmp_path: Path) -> None:
    place = tmp_path / "c"
    do.save_step(str(place), 1, numel=NUMEL)
    slow = victims.spawn(do.save_and_rest, str(place), 2, NUMEL)
    slow.wait_for("resting")
    with pytest.raises(CheckpointConflictError, match=str(place)):
        do.save_step(str(place), 3, job=1, numel=NUMEL)
    assert whole(load(place)) == (1, 0)
    slow.kill()
    slow.drain()
    # whoever held the place is dead, and with it what it held
    do.save_step(str(place), 4, job=1, numel=NUMEL)
    assert whole(load(place)) == (4, 1)
    assert litter(place) == set()


# --- readers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [25, pytest.param(400, marks=LONG)])
def test_reader_during_saves(victims: ForkServer, tmp_path: Path, rounds: int) -> None:
    place = tmp_path / "c"
    victims.run(do.once, str(place), 0)
    job = victims.spawn(do.save_rounds, str(place), 0, rounds, NUMEL)
    found = read_while(job.works, str(place))
    assert tally([job]) == {"ok": rounds}
    steps = [step for step, _ in found]
    assert steps == sorted(steps)
    assert steps[-1] == rounds


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=LONG)])
def test_reader_during_saves_and_prunes(victims: ForkServer, tmp_path: Path, rounds: int) -> None:
    """The newest is always there, and never goes back; an older one is whole, or gone and said."""
    root = tmp_path / "run"
    folder = CheckpointFolder(root)
    victims.run(do.fill_rounds, str(root), 0, 1, NUMEL)
    job = victims.spawn(do.fill_rounds, str(root), 1, rounds, NUMEL)
    newest, oldest = [], Counter()
    while True:
        last = not job.works()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            newest.append(whole(folder.load_latest())[0])
            paths = [info.path for info in folder.list()]
        for path in paths[:1]:
            try:
                whole(load(path))
                oldest["whole"] += 1
            except TORN:
                oldest["gone"] += 1
        if last:
            break
    assert job.result()[0] == "returned"
    assert newest == sorted(newest)
    assert newest[-1] == rounds
    assert oldest["whole"]


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=LONG)])
def test_prune_in_the_middle_of_a_read(tmp_path: Path, count: int) -> None:
    """A prune at every point of a read: the read gives all of it, or says that it is gone."""
    folder = CheckpointFolder(tmp_path / "run")
    for number in range(count):
        for step in (2 * number + 1, 2 * number + 2):
            do_save(folder, step)
        doomed = folder.path(2 * number + 1)
        assert whole(load(doomed))[0] == 2 * number + 1
        pruner = threading.Timer(0.0005 * number, lambda: folder.prune(keep_last(1), run_id=do.RUN))
        pruner.start()
        with pytest.raises(TORN, match="step-"):
            read_until_it_is_gone(doomed, 2 * number + 1)
        pruner.join()


def read_until_it_is_gone(url: str, step: int) -> None:
    while True:
        assert whole(load(url))[0] == step


def do_save(folder: CheckpointFolder, step: int) -> None:
    folder.save(step, do.state_of(step, NUMEL), metadata={"run_id": do.RUN})
