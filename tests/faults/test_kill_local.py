"""SIGKILL at any moment of a save to a local disk: afterwards the old or the new, whole."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
from faultkit import victims as do
from faultkit.forking import ForkServer
from faultkit.killing import Job, Kills
from faultkit.litter import litter
from faultkit.states import whole

import checkpoint_io
from checkpoint_io import CheckpointFolder, CheckpointWarning, load


def hunt_one_path(victims: ForkServer, tmp_path: Path, job: Job, ranks: int, count: int) -> None:
    place = tmp_path / "c"
    kills = Kills(victims, tmp_path, job, ranks)
    dirty = 0
    doomed = itertools.cycle([(0,), (ranks - 1,), tuple(range(ranks))])
    for fraction in kills.fractions(count):
        saved, begun = kills.once(str(place), fraction, next(doomed))
        for rank in range(ranks):
            step, _ = whole(load(place, rank=rank), rank)
            assert saved <= step <= begun, f"saved {saved}, began {begun}, found {step}"
        dirty += bool(litter(place))
    victims.run(do.once, str(place), kills.next_step)
    assert litter(place) == set(), "the next save leaves what the killed ones left"
    assert dirty or count < 10, "no kill came in the middle of a save: the test proves nothing"


SHORT = [(do.overwrite, 1, 10), (do.overwrite, 2, 3)]
LONG = [(do.overwrite, 1, 50), (do.overwrite, 2, 50)]


@pytest.mark.parametrize(
    ("job", "ranks", "count"),
    [
        *SHORT,
        *(pytest.param(*case, marks=[pytest.mark.slow]) for case in LONG),
    ],
)
def test_overwritten_path(
    victims: ForkServer, tmp_path: Path, job: Job, ranks: int, count: int
) -> None:
    hunt_one_path(victims, tmp_path, job, ranks, count)


@pytest.mark.skipif(
    not hasattr(checkpoint_io, "BackgroundSaver"), reason="no background saves in this version"
)
@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        (1, 3),
        pytest.param(1, 50, marks=[pytest.mark.slow]),
        pytest.param(2, 50, marks=[pytest.mark.slow]),
    ],
)
def test_background_save(victims: ForkServer, tmp_path: Path, ranks: int, count: int) -> None:
    hunt_one_path(victims, tmp_path, do.overwrite_in_background, ranks, count)


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        (1, 4),
        pytest.param(1, 50, marks=[pytest.mark.slow]),
        pytest.param(2, 50, marks=[pytest.mark.slow]),
    ],
)
def test_folder_of_checkpoints(victims: ForkServer, tmp_path: Path, ranks: int, count: int) -> None:
    root = tmp_path / "run"
    kills = Kills(victims, tmp_path, do.fill_folder, ranks)
    folder = CheckpointFolder(root)
    doomed = itertools.cycle([(0,), (ranks - 1,), tuple(range(ranks))])
    for fraction in kills.fractions(count):
        saved, begun = kills.once(str(root), fraction, next(doomed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # of the killed save's folder
            for rank in range(ranks):
                step, _ = whole(folder.load_latest(rank=rank), rank)
                assert saved <= step <= begun, f"saved {saved}, began {begun}, found {step}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        folder.prune(checkpoint_io.keep_last(2), run_id=do.RUN)
    kept = [info.name for info in folder.list()]
    # whose an empty folder is nobody can know, so it stays
    assert sorted(path.name for path in root.iterdir() if any(path.iterdir())) == kept
    assert len(kept) == 2
    assert not any(litter(root / name) for name in kept)


def points(calls: list[tuple[str, str]], every: int) -> list[int]:
    """Choose calls: every n-th, and those around the commit."""
    commit = next(n for n, (name, _) in enumerate(calls) if name in ("replace", "rename"))
    near = range(commit - 2, commit + 4) if every > 1 else range(len(calls))
    return sorted({*range(0, len(calls), every), *near} & set(range(len(calls))))


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "after", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["before", "after"]
)
def test_every_system_call(victims: ForkServer, tmp_path: Path, every: int, after: bool) -> None:
    place = tmp_path / "c"
    victims.run(do.once, str(place), 1)
    calls = victims.run(do.count_calls, str(place), 2)
    assert {name for name, _ in calls} >= {"open", "fsync", "unlink"}, calls
    step, found = 2, set()
    for at in points(calls, every):
        kind, _ = victims.spawn(do.save_and_die, str(place), step + 1, at, after).result()
        assert kind in ("killed", "returned")  # cleaning up may take a call more or less
        now, _ = whole(load(place))
        assert now in (step, step + 1), f"killed at call {at} {calls[at]}: {now} after {step}"
        assert kind == "killed" or now == step + 1
        found.add(now - step)
        step = now
    assert found == {0, 1}, "no kill came before the commit, or none after it"
    victims.run(do.once, str(place), step + 1)
    assert litter(place) == set()
