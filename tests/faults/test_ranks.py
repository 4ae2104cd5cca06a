"""One rank of several fails or dies: the others say so, nothing hangs, nothing is committed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from faultkit import groups
from faultkit.forking import ForkServer, Victim
from faultkit.litter import litter
from faultkit.states import whole

import checkpoint_io
from checkpoint_io import load

pytestmark = [pytest.mark.distributed]


@pytest.fixture
def place(victims: ForkServer, tmp_path: Path) -> Path:
    """A checkpoint of step 1 by two ranks."""
    place = tmp_path / "c"
    group = start(victims, tmp_path, groups.save_as_group, str(place), 1, 20_000)
    assert [victim.result()[0] for victim in group] == ["returned"] * 2
    return place


def start(victims: ForkServer, tmp_path: Path, job: Any, *args: Any) -> list[Victim]:
    return victims.ranks(2, job, 2, str(tmp_path / f"meet-{os.urandom(4).hex()}"), *args)


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def still_old(place: Path, before: set[str]) -> None:
    """The checkpoint of step 1 is there for both ranks and nothing was committed."""
    for rank in (0, 1):
        assert whole(load(place, rank=rank), rank) == (1, 0)
    assert before <= files(place)


# Where a rank fails: in encoding its state, at its first file, at a later one, at a sync. Here the
# ranks take turns; all of each are slow.
WHERE = [("state", 0, 1), ("open", 0, 0), ("write", 1, 1), ("fsync", 1, 0)]


@pytest.mark.parametrize(
    ("what", "nth", "bad"),
    [
        *WHERE,
        *(pytest.param(what, nth, 1 - bad, marks=pytest.mark.slow) for what, nth, bad in WHERE),
    ],
)
def test_a_rank_fails_in_a_save(
    victims: ForkServer, tmp_path: Path, place: Path, bad: int, what: str, nth: int
) -> None:
    before = files(place)
    group = start(victims, tmp_path, groups.save_with_a_bad_rank, str(place), 2, bad, what, nth)
    for victim in group:
        kind, text = victim.result()
        assert "Error" in kind, f"{kind}: {text}"
        assert f"rank {bad}" in text, f"the error does not name the rank: {text}"
        assert isinstance(getattr(checkpoint_io, kind)(), checkpoint_io.CheckpointError)
    still_old(place, before)
    assert files(place) == before, "what the ranks had written is left"


@pytest.mark.parametrize(
    ("bad", "what", "nth"),
    [
        (1, "write", 0),
        (0, "replace", 0),
        pytest.param(0, "write", 0, marks=pytest.mark.slow),
        pytest.param(1, "fsync", 0, marks=pytest.mark.slow),
        pytest.param(0, "fsync", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_dies_in_a_save(
    victims: ForkServer, tmp_path: Path, place: Path, bad: int, what: str, nth: int
) -> None:
    before = files(place)
    group = start(victims, tmp_path, groups.save_with_a_dead_rank, str(place), 2, bad, what, nth)
    assert group[bad].result()[0] == "killed"
    kind, text = group[1 - bad].result()
    assert "Error" in kind, f"the other rank: {kind}: {text}"
    assert f"rank {bad} did" in text or f"rank {bad} does" in text, f"who is not named: {text}"
    still_old(place, before)
    again = start(victims, tmp_path, groups.save_as_group, str(place), 3, 20_000)
    assert [victim.result()[0] for victim in again] == ["returned"] * 2
    for rank in (0, 1):
        assert whole(load(place, rank=rank), rank) == (3, 0)
    assert litter(place) == set()


def test_rank_0_dies_right_after_the_commit(
    victims: ForkServer, tmp_path: Path, place: Path
) -> None:
    """The other rank hears of no commit, and must not take back what the manifest names."""
    group = start(
        victims, tmp_path, groups.save_with_a_dead_rank, str(place), 2, 0, "replace", 0, True
    )
    assert group[0].result()[0] == "killed"
    kind, text = group[1].result()
    assert "Error" in kind, f"{kind}: {text}"
    for rank in (0, 1):
        assert whole(load(place, rank=rank), rank) == (2, 0)


def test_a_rank_is_stopped_and_the_others_do_not_wait_for_ever(
    victims: ForkServer, tmp_path: Path, place: Path
) -> None:
    """Stopped is worse than dead: no connection ends. The group's own timeout ends the wait."""
    before = files(place)
    group = start(victims, tmp_path, groups.save_with_a_stopped_rank, str(place), 2)
    kind, text = group[0].result()
    assert "Error" in kind, f"{kind}: {text}"
    group[1].kill()
    group[1].drain()
    still_old(place, before)


@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_fails_in_a_load(victims: ForkServer, tmp_path: Path, bad: int) -> None:
    """The newest is damaged for one rank alone: all take the older one, and all say why."""
    root = tmp_path / "run"
    for step in (1, 2):
        path = checkpoint_io.CheckpointFolder(root).path(step)
        group = start(victims, tmp_path, groups.save_as_group, path, step, 20_000)
        assert [victim.result()[0] for victim in group] == ["returned"] * 2
    newest = Path(checkpoint_io.CheckpointFolder(root).path(2))
    name = next(path for path in newest.iterdir() if path.match(f"objects-*-r0000{bad}.json"))
    name.write_bytes(name.read_bytes()[:-1] + b"!")
    group = start(victims, tmp_path, groups.load_latest_together, str(root))
    for victim in group:
        assert victim.result() == ("returned", ((1, 0), [name.name]))


@pytest.mark.parametrize("bad", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_dies_in_a_load(victims: ForkServer, tmp_path: Path, bad: int) -> None:
    root = tmp_path / "run"
    path = checkpoint_io.CheckpointFolder(root).path(1)
    group = start(victims, tmp_path, groups.save_as_group, path, 1, 20_000)
    assert [victim.result()[0] for victim in group] == ["returned"] * 2
    group = start(victims, tmp_path, groups.load_latest_together, str(root), bad)
    assert group[bad].result()[0] == "killed"
    kind, text = group[1 - bad].result()
    assert "Error" in kind, f"{kind}: {text}"
    assert f"rank {bad} d" in text, f"who is not named: {text}"
    assert whole(load(path)) == (1, 0)
