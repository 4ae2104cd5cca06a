from __future__ import annotations

import gc
import json
import os
import shutil
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import (
    CheckpointError,
    CheckpointFolder,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    SingleProcess,
    StateMismatchError,
    TornLoadError,
    keep_last,
    read_manifest,
    save,
)
from checkpoint_io.folder.folder import Fallback
from checkpoint_io.format.manifest import Manifest, seal
from checkpoint_io.loader import check_sizes
from checkpoint_io.storage.local import LocalStore


def fill(folder: CheckpointFolder, *steps: int, run_id: str = "r1") -> None:
    for step in steps:
        state = {"step": step, "w": torch.full((5,), float(step))}
        folder.save(step, state, metadata={"run_id": run_id})


def names(folder: CheckpointFolder) -> list[str]:
    return [info.name for info in folder.list()]


def test_newest_is_by_generation_not_by_step_or_clock(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 300, 200, 100)
    assert names(folder) == ["step-00000300", "step-00000200", "step-00000100"]
    latest = folder.latest()
    assert latest is not None
    assert latest.path == folder.path(100)
    fill(folder, 300)  # overwritten, so the newest again
    assert names(folder)[-1] == "step-00000300"
    assert folder.next_generation() == 5
    assert read_manifest(folder.path(300)).metadata["step"] == 300


def test_the_newest_is_loaded_as_the_rank_that_is_asked_for(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {}, local_state={"seen": 3})
    assert folder.load_latest().local_state == {"seen": 3}
    assert folder.load_latest(rank=1).local_state is None  # one rank saved it
    assert folder.open_latest(rank=1).local_state is None


def test_newest_is_by_generation_with_a_clock_that_runs_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1)

    class Slow(datetime):
        """A clock that was set back by a year."""

        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(days=365)

    monkeypatch.setattr("checkpoint_io.saver.commit.datetime", Slow)
    fill(folder, 2)
    for file in (tmp_path / "step-00000002").iterdir():
        os.utime(file, (0, 0))
    os.utime(tmp_path / "step-00000002", (0, 0))
    older, newer = (read_manifest(folder.path(step)).created for step in (1, 2))
    assert newer < older
    assert names(folder) == ["step-00000001", "step-00000002"]
    assert folder.load_latest().state["step"] == 2
    assert folder.open_latest().state["step"] == 2
    folder.prune(keep_last(1), run_id="r1")
    assert names(folder) == ["step-00000002"]


def test_empty_and_absent_folders(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "absent")
    assert folder.list() == []
    assert folder.latest() is None
    assert folder.next_generation() == 1
    with pytest.raises(CheckpointNotFoundError, match="check the path"):
        folder.load_latest()
    with pytest.raises(ValueError, match="step"):
        folder.path(-1)
    with pytest.raises(ValueError, match="plain folder name"):
        folder.save(1, {}, name="../x")


def test_relative_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = CheckpointFolder("runs/")
    fill(folder, 1)
    assert folder.path(1) == "runs/step-00000001"
    assert folder.load_latest().state["step"] == 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("memory://", "memory://step-00000001"),
        ("memory://a/", "memory://a/step-00000001"),
        ("/", "/step-00000001"),
        (Path("runs"), "runs/step-00000001"),
    ],
)
def test_paths_join(url: Any, expected: str) -> None:
    assert CheckpointFolder(url).path(1) == expected


def test_broken_ones_are_skipped_and_say_why(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 4)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    os.truncate(tmp_path / "step-00000003" / "manifest.json", 100)
    next((tmp_path / "step-00000002").glob("tensors-*")).unlink()
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "log.txt").write_text("foreign")
    with pytest.warns(CheckpointWarning) as caught:
        assert names(folder) == ["step-00000001"]
    text = "\n".join(str(w.message) for w in caught)
    assert "never finished" in text
    assert "not valid JSON" in text
    assert "missing" in text
    assert "best" not in text


def test_load_latest_falls_back_when_checksums_fail(tmp_path: Path, flip_bit: Any) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)
    flip_bit(next((tmp_path / "step-00000002").glob("tensors-*")), 4100)
    assert names(folder)[-1] == "step-00000002"
    with pytest.warns(CheckpointWarning, match="passed over .*step-00000002"):
        assert folder.load_latest().state["step"] == 1
    flip_bit(next((tmp_path / "step-00000001").glob("objects-*")), 50)
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CorruptCheckpointError, match="all are damaged"),
    ):
        folder.load_latest()


def test_prune_touches_only_its_own_run(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, run_id="other")
    fill(folder, 3, 4, 5)
    save(tmp_path / "unnamed", {"x": 1})
    (tmp_path / "step-00000003" / "notes.txt").write_text("mine")
    removed = folder.prune(keep_last(1), run_id="r1")
    assert removed == [folder.path(3), folder.path(4)]
    left = ["step-00000001", "step-00000002", "step-00000005", "unnamed"]
    assert sorted(names(folder)) == left
    assert [p.name for p in (tmp_path / "step-00000003").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "step-00000004").exists()


def test_prune_keeps_what_is_asked_and_always_the_newest_valid(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 4)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        folder.prune({folder.path(1) + "/"}, run_id="r1")
        assert names(folder) == ["step-00000001", "step-00000003"]
        folder.prune(folder.path(1), run_id="r1")
        folder.prune([], run_id="nobody")
        assert names(folder) == ["step-00000001", "step-00000003"]
        folder.prune(set(), run_id="r1")
    assert names(folder) == ["step-00000003"]


def test_prune_removes_unfinished_saves_of_its_run_only(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 5)
    fill(folder, 4, run_id="other")
    for step in (1, 2, 3, 4):
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    torn = next((tmp_path / "step-00000001").glob("objects-*"))
    os.truncate(torn, 3)  # cut short; the tensor file of the same save still says whose it is
    folder.prune([folder.path(2)], run_id="r1", in_progress=[folder.path(3)])
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-00000002", "step-00000003", "step-00000004", "step-00000005"]


def test_links_are_no_checkpoints(tmp_path: Path) -> None:
    other = CheckpointFolder(tmp_path / "other")
    fill(other, 1)
    folder = CheckpointFolder(tmp_path / "runs")
    fill(folder, 2)
    (tmp_path / "runs" / "step-00000001").symlink_to(tmp_path / "other" / "step-00000001")
    assert names(folder) == ["step-00000002"]
    folder.prune(keep_last(1), run_id="r1")
    assert names(other) == ["step-00000001"]


def test_survey_says_what_each_folder_is(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 4)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    os.truncate(tmp_path / "step-00000003" / "manifest.json", 100)
    next((tmp_path / "step-00000004").glob("tensors-*")).unlink()
    (tmp_path / "logs").mkdir()
    found = {entry.name: entry for entry in folder.survey()}
    assert [found[name].status for name in sorted(found)] == [
        "foreign", "valid", "unfinished", "broken", "broken",
    ]  # fmt: skip
    assert found["step-00000001"].reason == ""
    assert found["step-00000001"].info.manifest.metadata["step"] == 1
    assert "never finished" in found["step-00000002"].reason
    assert "not valid JSON" in found["step-00000003"].reason
    assert "tensors-" in found["step-00000004"].reason
    assert found["step-00000004"].manifest is not None
    with pytest.raises(ValueError, match="broken"):
        _ = found["step-00000004"].info


@pytest.fixture
def manifests_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose manifests were parsed, in turn."""
    import checkpoint_io.folder.discovery as discovery

    read: list[str] = []
    real = discovery.manifest_of

    def counting(store: Any, *, tensors: bool) -> Any:
        read.append(store.url.rsplit("/", 1)[-1])
        return real(store, tensors=tensors)

    monkeypatch.setattr(discovery, "manifest_of", counting)
    return read


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_manifest_is_read_once(tmp_path: Path, manifests_read: list[str], place: str) -> None:
    folder = CheckpointFolder(tmp_path if place == "local" else "memory://read-once")
    fill(folder, 1, 2, 3)
    assert folder.next_generation() == 4
    assert manifests_read == []  # a generation stands at the head of its file
    folder.list()
    folder.latest()
    folder.prune(keep_last(3), run_id="r1")
    assert sorted(manifests_read) == ["step-00000001", "step-00000002", "step-00000003"]
    del manifests_read[:]
    fill(folder, 2, 4)
    folder.prune(keep_last(2), run_id="r1")
    assert sorted(manifests_read) == ["step-00000002", "step-00000004"]
    assert names(folder) == ["step-00000002", "step-00000004"]
    assert CheckpointFolder(folder.url).next_generation() == 6


def test_what_is_remembered_of_manifests_is_bounded_by_files_and_chunks(
    tmp_path: Path, manifests_read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint_io.folder.discovery._CACHED_ENTRIES", 4)
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)  # each has two files, and one tensor of one chunk
    folder.list()
    folder.list()
    assert len(manifests_read) == 2
    fill(folder, 3)
    folder.list()
    folder.list()
    assert manifests_read[2:] == ["step-00000003", "step-00000001"]
    del manifests_read[:]
    newest = folder.list()
    del manifests_read[:]
    for info in newest:
        assert len(info.manifest.tensors) == 1  # from now on each takes one more
    folder.list()
    folder.list()
    assert len(manifests_read) > 2
    assert names(folder) == ["step-00000001", "step-00000002", "step-00000003"]


def test_nothing_is_remembered_of_checkpoints_that_are_gone(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 4, 5)
    seen = {one.name: weakref.ref(one.manifest) for one in folder.list()}
    folder.prune(keep_last(2), run_id="r1")
    folder.list()
    gc.collect()
    kept = [name for name, manifest in seen.items() if manifest() is not None]
    assert kept == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("how", ["probe", "save", "prune"])
def test_probes_that_were_killed_are_removed_a_day_later(tmp_path: Path, how: str) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, {"x": torch.ones(1)}, metadata={"run_id": "r"})
    place = tmp_path if how == "probe" else tmp_path / folder.list()[0].name
    old, new = (f"probe-{int(time.time()) - age:08x}-{'0' * 16}.tmp" for age in (90_000, 60))
    for name in (old, new):
        (place / name).write_bytes(b"x")
    if how == "probe":
        folder.probe()
    elif how == "save":
        save(place, {"x": torch.zeros(1)}, metadata={"run_id": "r"})
    else:
        (place / new).unlink()
        folder.prune(keep_last(1), run_id="r")
        assert not place.exists()
        return
    assert not (place / old).exists()
    assert (place / new).exists()  # perhaps another process is at it


def test_probe_finds_a_wrong_place(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path / "new").probe()
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot save to"):
        CheckpointFolder(tmp_path / "file").probe()


def test_load_latest_in_place_falls_back_before_it_writes(tmp_path: Path, flip_bit: Any) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, {"model": {"w": torch.full((5,), float(step))}, "step": step})
    flip_bit(next((tmp_path / "step-00000002").glob("tensors-*")), 4100)
    weight = torch.zeros(5)
    with pytest.warns(CheckpointWarning, match="passed over"):
        found = folder.load_latest(into={"model": {"w": weight}})
    assert found.state["model"]["w"] is weight
    assert weight.tolist() == [1.0] * 5
    flip_bit(next((tmp_path / "step-00000001").glob("tensors-*")), 4100)
    with pytest.warns(CheckpointWarning), pytest.raises(CorruptCheckpointError) as caught:
        folder.load_latest(into={"model": {"w": weight}})
    assert not isinstance(caught.value, TornLoadError)
    assert weight.tolist() == [1.0] * 5


def test_load_latest_verifies_every_part_before_it_writes_the_first(
    tmp_path: Path, flip_bit: Any
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"first": torch.ones(8), "second": torch.ones(8)})
    file = next((tmp_path / "step-00000001").glob("tensors-*"))
    flip_bit(file, file.stat().st_size - 1)  # in the second tensor, which has a part of its own
    targets = {"first": torch.zeros(8), "second": torch.zeros(8)}
    with (
        pytest.warns(CheckpointWarning, match="in tensor second"),
        pytest.raises(CorruptCheckpointError, match="all are damaged"),
    ):
        folder.load_latest(into=targets)
    assert [target.tolist() for target in targets.values()] == [[0.0] * 8] * 2


class RemovesTheNewest(SingleProcess):
    """Removes a checkpoint after it was chosen and before it is opened, as another job may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object, which names the checkpoint to try."""
        if self.path.exists():
            shutil.rmtree(self.path)
        return obj


@pytest.mark.parametrize("method", ["load_latest", "open_latest"])
def test_a_checkpoint_that_vanishes_between_listing_and_loading_is_passed_over(
    tmp_path: Path, method: str
) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)
    group = RemovesTheNewest(tmp_path / "step-00000002")
    with pytest.warns(CheckpointWarning, match="passed over .*step-00000002"):
        found = getattr(folder, method)(group=group)
    assert found.state["step"] == 1


def test_load_latest_does_not_fall_back_from_a_sound_one_that_does_not_fit(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"model": {"w": torch.zeros(5)}})
    folder.save(2, {"model": {"w": torch.zeros(6)}})
    with pytest.raises(StateMismatchError):
        folder.load_latest(into={"model": {"w": torch.zeros(5)}})


def test_load_latest_takes_the_options_of_load(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"a": torch.ones(2), "b": torch.zeros(2)})
    state = folder.load_latest(only="a").state
    assert isinstance(state["a"], torch.Tensor)
    assert not isinstance(state["b"], torch.Tensor)


def test_open_latest_checks_sizes_and_headers(tmp_path: Path, flip_bit: Any) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3)
    flip_bit(next((tmp_path / "step-00000003").glob("tensors-*")), 30)
    with pytest.warns(CheckpointWarning, match="passed over .*step-00000003"):
        reader = folder.open_latest()
    assert reader.state["step"] == 2
    assert reader["w"].read().tolist() == [2.0] * 5
    with pytest.warns(CheckpointWarning):
        assert folder.open_latest(skip=[folder.path(2) + "/"]).state["step"] == 1
    with pytest.warns(CheckpointWarning), pytest.raises(CorruptCheckpointError):
        folder.open_latest(skip=[folder.path(1), folder.path(2)])


def test_only_broken_ones_are_not_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1)
    os.truncate(tmp_path / "step-00000001" / "manifest.json", 100)
    # a run that begins again here would lose what may still be mended
    with pytest.warns(CheckpointWarning), pytest.raises(CorruptCheckpointError):
        folder.load_latest()
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointNotFoundError):
        folder.load_latest()


def test_a_job_is_saved_later(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    job = folder.prepare_save(3, {"lr": 0.1}, metadata={"run_id": "r1"})
    fill(folder, 1)
    assert job.run().generation == 2
    assert names(folder) == ["step-00000001", "step-00000003"]


def test_the_root_of_a_disk(tmp_path: Path) -> None:
    """`lost+found` belongs to the filesystem; only root may look into it."""
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "lost+found")
    assert [entry.name for entry in folder.survey()] == ["step-00000001"]
    assert folder.next_generation() == 2


@pytest.mark.parametrize(
    "newest",
    [
        pytest.param(
            lambda folder: folder.load_latest().manifest.metadata["step"], id="load_latest"
        ),
        pytest.param(
            lambda folder: folder.open_latest().manifest.metadata["step"], id="open_latest"
        ),
        pytest.param(lambda folder: folder.latest().manifest.metadata["step"], id="latest"),
        pytest.param(lambda folder: folder.list()[-1].manifest.metadata["step"], id="list"),
    ],
)
@pytest.mark.parametrize("replacements", [1, 3])
def test_a_newest_that_is_replaced_during_a_scan_is_found(
    newest: Callable[[CheckpointFolder], int],
    replacements: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader must not go back to an older one because a save has removed the replaced files."""
    folder, writer = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    fill(writer, 0, 1)
    left = [1] * replacements

    def replace_first(store: LocalStore, manifest: Manifest) -> None:
        if left and manifest.metadata["step"] == 1:
            fill(writer, left.pop())
        check_sizes(store, manifest)

    monkeypatch.setattr("checkpoint_io.folder.discovery.check_sizes", replace_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        assert newest(folder) == 1
    assert not left


def test_a_checkpoint_that_is_pruned_during_a_scan_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 0, 1)

    def prune_first(store: LocalStore, manifest: Manifest) -> None:
        if manifest.metadata["step"] == 0:
            monkeypatch.undo()
            assert CheckpointFolder(tmp_path).prune(keep_last(1), run_id="r1") == [folder.path(0)]
        check_sizes(store, manifest)

    monkeypatch.setattr("checkpoint_io.folder.discovery.check_sizes", prune_first)
    first, second = folder.survey()
    assert (first.status, first.manifest, second.status) == ("foreign", None, "valid")


@pytest.mark.parametrize("problem", [OSError("the network is down"), StateMismatchError("names")])
def test_after_a_torn_attempt_every_failure_says_so(tmp_path: Path, problem: Exception) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)
    errors = [TornLoadError("half written"), problem]

    def attempt(path: str) -> None:
        raise errors.pop(0)

    with pytest.warns(CheckpointWarning), pytest.raises(TornLoadError, match="a mixture"):
        Fallback(str(tmp_path), folder.survey, SingleProcess(), in_place=True).run(attempt)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were listed, with a slash, and the manifests that were opened, in turn."""
    from checkpoint_io.storage.fsspec_store import FsspecStore

    seen: list[str] = []
    for kind, listing in ((LocalStore, "_scan"), (FsspecStore, "_names")):
        opened, listed = kind.open, getattr(kind, listing)

        def counting_open(store: Any, name: str, opened: Any = opened) -> Any:
            if name == "manifest.json":
                seen.append(store.url.rsplit("-", 1)[-1])
            return opened(store, name)

        def counting_list(store: Any, *args: Any, listed: Any = listed) -> Any:
            seen.append(store.url.rsplit("-", 1)[-1] + "/")
            return listed(store, *args)

        monkeypatch.setattr(kind, "open", counting_open)
        monkeypatch.setattr(kind, listing, counting_list)
    return seen


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_save_looks_only_at_what_changed_since_the_last_one(
    tmp_path: Path, looks: list[str], place: str
) -> None:
    url = str(tmp_path / "at-x") if place == "local" else "memory://looks-x"
    folder = CheckpointFolder(url)
    fill(folder, 1, 2, 3)
    assert folder.next_generation() == 4
    del looks[:]
    assert folder.next_generation() == 4
    assert looks == ["x/"]
    CheckpointFolder(url).save(2, {"other": "writer"})  # in a folder that is known
    CheckpointFolder(url).save(7, {"other": "writer"})
    del looks[:]
    assert folder.next_generation() == 6
    assert looks == ["x/", "00000002", "00000007"]
    folder.prune("step-00000007", run_id="r1")
    assert folder.next_generation() == 6  # 2, of no run, is the highest but one


@pytest.mark.parametrize("place", ["local", "memory"])
def test_the_latest_is_the_only_one_that_is_checked(
    tmp_path: Path, looks: list[str], manifests_read: list[str], place: str
) -> None:
    url = str(tmp_path / "at-x") if place == "local" else "memory://checks-x"
    fill(CheckpointFolder(url), 3, 2, 1)
    folder = CheckpointFolder(url)
    del looks[:]
    latest = folder.latest()
    assert latest is not None
    assert latest.name == "step-00000001"
    assert manifests_read == ["step-00000001"]
    assert [look for look in looks if look.endswith("/")] == ["x/", "00000001/"]
    del looks[:]
    assert folder.latest() == latest
    assert looks == ["x/", "00000001/"]


def test_the_latest_is_found_below_newer_ones_that_are_not_valid(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 4, 5)
    next((tmp_path / "step-00000001").glob("tensors-*")).unlink()  # older, so of no interest
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    next((tmp_path / "step-00000004").glob("tensors-*")).unlink()
    os.truncate(tmp_path / "step-00000005" / "manifest.json", 200)
    (tmp_path / "logs").mkdir()
    with pytest.warns(CheckpointWarning) as caught:
        latest = folder.latest()
    assert latest is not None
    assert latest.name == "step-00000002"
    skipped = [str(warning.message).split(":")[0] for warning in caught]
    assert skipped == [f"skipped step-0000000{step}" for step in (3, 5, 4)]
    assert folder.next_generation() == 6  # the head of the truncated one is still there
    shutil.rmtree(tmp_path / "step-00000002")
    with pytest.warns(CheckpointWarning) as caught:
        assert folder.latest() is None
    assert "step-00000001" in str(caught[-1].message)


def test_of_equal_generations_the_later_one_is_the_latest(tmp_path: Path) -> None:
    for step in (2, 1):
        save(tmp_path / f"step-0000000{step}", {"step": step}, generation=3)
        time.sleep(0.002)
    latest = CheckpointFolder(tmp_path).latest()
    assert latest is not None
    assert latest.name == "step-00000001"


def test_an_age_is_read_only_where_a_manifest_has_it(tmp_path: Path) -> None:
    """A field of the metadata may have the name and the form of the generation."""
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)
    file = tmp_path / "step-00000001" / "manifest.json"
    document = json.loads(file.read_bytes())
    document = {"metadata": {"generation": 9, "created": "x"}, **document}
    document["metadata"] = {"generation": 9, "created": "x"}
    file.write_bytes(seal(document))
    latest = folder.latest()
    assert latest is not None
    assert latest.name == "step-00000002"
    assert folder.next_generation() == 3
    assert file.parent.name in folder.names()


def test_names_are_one_listing(tmp_path: Path, looks: list[str]) -> None:
    folder = CheckpointFolder(tmp_path / "at-x")
    fill(folder, 1)
    (tmp_path / "at-x" / "logs").mkdir()
    del looks[:]
    assert folder.names() == ["logs", "step-00000001"]
    assert looks == ["x/"]


def test_an_age_that_no_token_dates_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may not show a manifest yet that can be read, and not show it any more later."""
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)
    usual = LocalStore.versions
    monkeypatch.setattr(
        LocalStore, "versions", lambda store, name: {**usual(store, name), "step-00000002": ""}
    )
    assert folder.next_generation() == 3
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    assert folder.next_generation() == 2


def test_all_names_must_be_there_unless_told_otherwise(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"model": {"a": torch.ones(2)}})
    targets = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    with pytest.raises(StateMismatchError, match="b"):
        folder.load_latest(into=targets)
    folder.load_latest(into=targets, strict=False)
    assert targets["model"]["a"].tolist() == [1.0, 1.0]


def test_each_checkpoint_that_is_skipped_is_reported_once(tmp_path: Path, flip_bit: Any) -> None:
    reports: list[str] = []
    folder = CheckpointFolder(tmp_path, on_warning=reports.append)
    fill(folder, 1, 2, 3, 4)
    os.truncate(tmp_path / "step-00000004" / "manifest.json", 100)
    for step in (2, 3):  # each is one more attempt, before which the folder is listed again
        flip_bit(next((tmp_path / f"step-0000000{step}").glob("tensors-*")), 4100)
    assert folder.load_latest().state["step"] == 1
    assert [report.split(":")[0] for report in reports[:1]] == ["skipped step-00000004"]
    assert [report.startswith("passed over ") for report in reports] == [False, True, True]
