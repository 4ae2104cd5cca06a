"""A disk that is full, over its quota, read-only, forbidden or gone: said, and nothing is lost."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faultkit import victims as do
from faultkit.disks import loop_disk, tiny_disk
from faultkit.forking import ForkServer
from faultkit.litter import litter
from faultkit.states import whole

from checkpoint_io import CheckpointFolder, load

NUMEL = 200_000  # a state of 1.6 MB
BIG = 6_000_000  # one of 48 MB

root_only = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may become another user"
)


def said(outcome: tuple[str, str], place: Path, *words: str) -> None:
    """Check that a save failed with a clear error: one of ours or the system's, that says where."""
    kinds, text = outcome
    assert "CheckpointError" in kinds or "OSError" in kinds, f"{kinds}: {text}"
    assert str(place) in text, f"the error does not say where: {text}"
    assert any(word in text for word in words), f"the error does not say what: {text}"


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


@pytest.fixture(params=["tmpfs", pytest.param("ext4", marks=pytest.mark.slow)])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk with room for some small states and for no big one."""
    if request.param == "tmpfs":
        with tiny_disk(tmp_path, megabytes=24) as path:
            yield path
    else:
        with loop_disk(tmp_path, "ext4", megabytes=32) as disk:
            yield disk.path


def test_full_disk(victims: ForkServer, small_disk: Path) -> None:
    place = small_disk / "c"
    job = victims.spawn(do.try_on_demand, str(place))
    assert job.ask(1, NUMEL) == ("ok", "")
    before = files(place)
    for step in (2, 3):  # the second failure shows that the first one gave its buffers back
        said(job.ask(step, BIG), place, "No space left on device", "full")
        assert whole(load(place)) == (1, 0)
        assert files(place) == before, "what was half written is left on a full disk"
    # training goes on in the same process, and its next save finds room
    assert job.ask(4, NUMEL) == ("ok", "")
    job.kill()
    assert whole(load(place)) == (4, 0)
    assert litter(place) == set()


def test_full_disk_in_the_background(victims: ForkServer, tmp_path: Path) -> None:
    """The training goes on meanwhile; the failure is raised where it is waited for, every time."""
    with tiny_disk(tmp_path, megabytes=24) as disk:
        place = disk / "c"
        job = victims.spawn(do.try_in_background, str(place))
        assert job.ask(1, NUMEL) == ("ok", "")
        before = files(place)
        for step in (2, 3):
            said(job.ask(step, BIG), place, "No space left on device", "full")
            assert whole(load(place)) == (1, 0)
            assert files(place) == before
        assert job.ask(4, NUMEL) == ("ok", "")
        job.kill()
        assert whole(load(place)) == (4, 0)
        assert litter(place) == set()


def test_full_disk_under_the_manifest(victims: ForkServer, tmp_path: Path) -> None:
    """The tensors fit and the manifest does not."""
    with tiny_disk(tmp_path, megabytes=8) as disk:
        place = disk / "c"
        job = victims.spawn(do.try_on_demand, str(place))
        assert job.ask(1, NUMEL) == ("ok", "")
        before = files(place)
        job.send(("fill", "manifest", str(disk)))
        said(job.ask(2, NUMEL), place, "No space left on device", "full")
        job.send(("calm",))
        assert whole(load(place)) == (1, 0)
        assert files(place) == before
        (disk / "filler").unlink()
        assert job.ask(3, NUMEL) == ("ok", "")
        job.kill()
        assert whole(load(place)) == (3, 0)


def test_file_size_limit(victims: ForkServer, tmp_path: Path) -> None:
    """What runs where no disk may be mounted: the kernel refuses files over a limit."""
    place = tmp_path / "c"
    job = victims.spawn(do.try_on_demand, str(place))
    assert job.ask(1, NUMEL) == ("ok", "")
    before = files(place)
    job.send(("limit", resource.RLIMIT_FSIZE, 4 * 2**20))
    said(job.ask(2, BIG), place, "File too large", "too large")
    assert whole(load(place)) == (1, 0)
    assert files(place) == before
    assert job.ask(3, NUMEL) == ("ok", "")
    job.kill()
    assert whole(load(place)) == (3, 0)


CALLS = ["open", "write", "fsync", "replace"]


@pytest.mark.parametrize("error", ["EDQUOT", "EIO", "ENOSPC"])
@pytest.mark.parametrize("call", CALLS)
def test_system_call_fails(victims: ForkServer, tmp_path: Path, error: str, call: str) -> None:
    """A quota or a broken disk: no such disk can be made here, so the calls themselves fail."""
    place = tmp_path / "c"
    job = victims.spawn(do.try_on_demand, str(place))
    assert job.ask(1, NUMEL) == ("ok", "")
    before = files(place)
    for nth in (0, 1, 3):
        job.send(("fail", call, error, nth))
        outcome = job.ask(2, NUMEL)
        job.send(("calm",))
        if outcome == ("ok", ""):
            # fewer calls than that, or one after the commit, which clean-up may lose
            assert nth
            assert whole(load(place)) == (2, 0)
            assert job.ask(1, NUMEL) == ("ok", "")
            before = files(place)
            continue
        said(outcome, place, os.strerror(getattr(__import__("errno"), error)))
        found, _ = whole(load(place))
        assert found == 1
        assert files(place) == before
    assert job.ask(4, NUMEL) == ("ok", "")
    job.kill()
    assert whole(load(place)) == (4, 0)
    assert litter(place) == set()


def test_read_only_disk(victims: ForkServer, tmp_path: Path) -> None:
    with tiny_disk(tmp_path, megabytes=24) as disk:
        place = disk / "c"
        job = victims.spawn(do.try_on_demand, str(place))
        assert job.ask(1, NUMEL) == ("ok", "")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        said(job.ask(2, NUMEL), place, "Read-only file system")
        assert whole(load(place)) == (1, 0)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert job.ask(3, NUMEL) == ("ok", "")
        job.kill()
        assert whole(load(place)) == (3, 0)


def let_others_in(path: Path) -> None:
    """Open pytest's own folders, which are for its user alone."""
    for folder in (path, *path.parents):
        mode = folder.stat().st_mode
        if mode & 0o005 != 0o005:
            folder.chmod(mode | 0o005)


@root_only
def test_permission_denied(victims: ForkServer, tmp_path: Path) -> None:
    let_others_in(tmp_path)
    place = tmp_path / "c"
    victims.run(do.once, str(place), 1)
    place.chmod(0o755)
    job = victims.spawn(do.try_on_demand, str(place))
    job.send(("become", 65534))
    said(job.ask(2, NUMEL), place, "Permission denied")
    assert whole(load(place)) == (1, 0)
    assert litter(place) == set()
    place.chmod(0o777)
    assert job.ask(3, NUMEL) == ("ok", "")
    job.kill()
    assert whole(load(place)) == (3, 0)


@root_only
def test_folder_that_may_not_be_made(victims: ForkServer, tmp_path: Path) -> None:
    let_others_in(tmp_path)
    job = victims.spawn(do.try_on_demand, str(tmp_path / "new" / "c"))
    job.send(("become", 65534))
    said(job.ask(1, NUMEL), tmp_path, "Permission denied")
    job.kill()


@pytest.mark.parametrize("nth", [0, 1, 4])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_folder_removed_in_the_middle(
    victims: ForkServer, tmp_path: Path, call: str, nth: int
) -> None:
    folder = CheckpointFolder(tmp_path / "run")
    victims.run(do.once, folder.path(1), 1)
    place = Path(folder.path(2))
    job = victims.spawn(do.try_on_demand, str(place))
    job.send(("remove", call, nth))
    kinds, text = job.ask(2, NUMEL)
    job.send(("calm",))
    assert whole(folder.load_latest()) == (1, 0)
    assert kinds != "ok", "what is gone was reported saved"
    said((kinds, text), place, "No such file", "removed", "does not see", "gone")
    assert job.ask(3, NUMEL) == ("ok", "")
    job.kill()
    assert whole(folder.load_latest()) == (3, 0)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("not a folder")
    said(
        do.attempt(lambda: do.save_step(str(tmp_path / "c"), 1)),
        tmp_path / "c",
        "irectory",
        "xists",
    )
    assert (tmp_path / "c").read_text() == "not a folder"


def test_the_controls_do_nothing_by_themselves(victims: ForkServer, tmp_path: Path) -> None:
    """Watching the calls does not change them."""
    job = victims.spawn(do.try_on_demand, str(tmp_path / "c"))
    job.send(("fail", "write", "EIO", 10_000))
    outcome: Any = job.ask(1, NUMEL)
    assert outcome == ("ok", "")
    job.kill()
    assert whole(load(tmp_path / "c")) == (1, 0)
