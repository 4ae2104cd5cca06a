"""The power goes: what was reported saved is there, bitwise; otherwise what was there before."""

from __future__ import annotations

import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faultkit import victims as do
from faultkit.disks import LoopDisk, loop_disk
from faultkit.forking import ForkServer
from faultkit.recording import Disk, write_tree
from faultkit.states import whole

from checkpoint_io import CheckpointFolder, CheckpointNotFoundError, CheckpointWarning, load

# --- a recording disk: runs everywhere, tries every moment ----------------------------------


def latest(place: Path) -> int:
    """Return the step that a resume would find at a place, 0 for none."""
    if (place / "c").exists() and any((place / "c").glob("step-*")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            return whole(CheckpointFolder(place / "c").load_latest())[0]
    return whole(load(place / "c"))[0]


def replay(events: list[Any], root: str, scratch: Path, every: int) -> tuple[int, set[int]]:
    """Crash after each event and look; return how many crashes, and which distances were found."""
    disk, chance = Disk(root), random.Random(3)
    saved = begun = crashes = 0
    distances = set()
    for number, event in enumerate(events):
        disk.apply(event)
        if event[0] == "mark":
            begun = max(begun, event[2])
            saved = event[2] if event[1] == "saved" else saved
        if event[0] == "write" and number % every:
            continue
        for tree in disk.crashes(chance):
            crashes += 1
            write_tree(tree, scratch)
            try:
                step = latest(scratch)
            except CheckpointNotFoundError:
                step = 0
            assert saved <= step <= begun, (
                f"crash after event {number} {event[:2]}: {saved} was reported saved, "
                f"{begun} begun, {step} found in {sorted(tree)}"
            )
            distances.add(step - saved)
            shutil.rmtree(scratch)
    return crashes, distances


@pytest.mark.parametrize(
    ("job", "steps", "numel", "every"),
    [
        (do.record_saves, 2, 3000, 1),
        (do.record_folder, 3, 3000, 6),
        # large enough for direct IO and for several buffers of it
        pytest.param(do.record_saves, 2, 6_000_000, 5, marks=pytest.mark.slow),
        pytest.param(do.record_folder, 6, 300_000, 1, marks=pytest.mark.slow),
    ],
)
def test_what_was_not_synced_is_lost(
    victims: ForkServer, tmp_path: Path, job: Callable[..., Any], steps: int, numel: int, every: int
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    events = victims.run(job, str(root), str(root / "c"), steps, numel)
    crashes, distances = replay(events, str(root), tmp_path / "after", every)
    assert crashes > len(events) // every
    assert distances == {0, 1}, "no crash came before a commit, or none after one"


def test_recording_is_complete(victims: ForkServer, tmp_path: Path) -> None:
    """The control: all events together give the files that are really there."""
    root = tmp_path / "disk"
    root.mkdir()
    events = victims.run(do.record_saves, str(root), str(root / "c"), 2, 3_000_000)
    disk = Disk(str(root))
    for event in events:
        disk.apply(event)
    real = {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }
    assert disk.now() == real


def test_replay_sees_a_missing_sync(victims: ForkServer, tmp_path: Path) -> None:
    """The control of the model: without any one fsync before a commit it finds a loss."""
    root = tmp_path / "disk"
    root.mkdir()
    events = victims.run(do.record_saves, str(root), str(root / "c"), 2, 3000)
    syncs = [n for n, event in enumerate(events) if event[0] in ("sync", "sync folder")]
    begin = events.index(("mark", "begin", 2))
    removal = next(n for n, e in enumerate(events) if e[0] == "unlink" and n > begin)
    needed = [n for n in syncs if begin < n < removal]
    assert len(needed) >= 3
    for number in {needed[0], needed[-1], next(n for n in needed if events[n][0] == "sync")}:
        forgetful = [event for n, event in enumerate(events) if n != number]
        found = "nothing"
        try:
            replay(forgetful, str(root), tmp_path / f"after-{number}", 1)
        except Exception as error:
            found = type(error).__name__
        else:
            # a folder is synced more often than it must be; the next sync may stand in
            assert events[number][0] == "sync folder", f"event {number}: {found}"


# --- a real disk, switched off ---------------------------------------------------------------


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with loop_disk(tmp_path, request.param, megabytes=320) as made:
        yield made


def cut_power(
    victims: ForkServer, disk: LoopDisk, start: int, delay: float | None, numel: int
) -> tuple[int, int]:
    """Cut the power right after a save returned, or some time into the next one; power up again."""
    victim = victims.spawn(do.save_on_demand, str(disk.path / "c"), numel)
    victim.send(start)
    victim.wait_for("saved")
    saved = begun = start
    if delay is not None:
        victim.send(start + 1)
        victim.wait_for("begin")
        begun += 1
        time.sleep(delay)
    disk.cut_power()
    victim.kill()
    saved = max([saved, *(m[1] for m in victim.drain() if m[0] == "saved")])
    disk.power_up()
    return saved, begun


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_real_power_cut(victims: ForkServer, disk: LoopDisk, rounds: int) -> None:
    numel, chance = 2_000_000, random.Random(5)
    step = 1
    for number in range(rounds):
        delay = None if number % 2 == 0 else chance.uniform(0.0, 0.12)
        saved, begun = cut_power(victims, disk, step, delay, numel)
        found, _ = whole(load(disk.path / "c"))
        assert saved <= found <= begun, f"{saved} was reported saved, {found} is there"
        step = begun + 1


def test_the_power_is_really_cut(disk: LoopDisk) -> None:
    """The control: what was not synced is gone."""
    (disk.path / "careless").write_bytes(b"x" * 10_000)
    disk.cut_power()
    disk.power_up()
    careless = disk.path / "careless"
    assert not careless.exists() or careless.read_bytes() != b"x" * 10_000
