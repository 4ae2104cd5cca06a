"""What stays and what goes: policies, and pruning beside other runs, saves and readers."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import (
    CheckpointFolder,
    CheckpointInfo,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    KeepPolicy,
    any_of,
    keep_best,
    keep_every,
    keep_last,
    load,
    save,
)
from checkpoint_io.storage.open import open_store


def fill(folder: CheckpointFolder, *steps: int, run_id: str = "r1", **metadata: Any) -> None:
    for step in steps:
        state = {"step": step, "w": torch.full((300,), float(step))}
        folder.save(step, state, metadata={"run_id": run_id, **metadata})


def steps_of(infos: list[CheckpointInfo]) -> list[int]:
    return [info.manifest.metadata["step"] for info in infos]


@pytest.fixture
def scored(tmp_path: Path) -> CheckpointFolder:
    folder = CheckpointFolder(tmp_path / "scored")
    scores: list[Any] = [0.5, 0.2, float("nan"), 0.2, None, "good", True, 10**400, 0.9]
    for step, score in enumerate(scores):
        fill(folder, step, loss=score)
    return folder


def test_best_by_a_key_of_the_metadata(scored: CheckpointFolder) -> None:
    found = scored.list()
    assert steps_of(keep_best(3, "loss")(found)) == [0, 1, 3]
    assert steps_of(keep_best(1, "loss")(found)) == [1]  # of equal ones the older
    assert steps_of(keep_best(2, "loss", "max")(found)) == [0, 8]
    assert keep_best(2, "accuracy")(found) == []
    best, worst = scored.best("loss"), scored.best("loss", "max")
    assert best is not None
    assert worst is not None
    assert steps_of([best, worst]) == [1, 8]
    assert scored.best("accuracy") is None
    assert scored.best() is None


def test_best_by_the_score(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, score={"monitor": "val/loss", "value": 0.3})
    fill(folder, 2, score={"monitor": "val/loss", "value": 0.1})
    fill(folder, 3, score={"monitor": "other", "value": 0.0}, **{"val/loss": 0.2})
    fill(folder, 4, score=-1.0)
    fill(folder, 5, score={"value": "text"})
    found = folder.list()
    assert steps_of(keep_best(2, "val/loss")(found)) == [2, 3]
    assert steps_of(keep_best(2)(found)) == [3, 4]


def test_policies_are_joined(scored: CheckpointFolder) -> None:
    found = scored.list()
    assert steps_of((keep_last(2) | keep_every(4))(found)) == [0, 4, 7, 8]
    assert steps_of(any_of(keep_last(1), lambda infos: infos[:1])(found)) == [0, 8]
    assert any_of()(found) == []
    named = KeepPolicy(lambda infos: [i for i in infos if i.name.endswith("5")])
    assert steps_of((named | keep_last(1) | keep_best(1, "loss"))(found)) == [1, 5, 8]


def test_a_step_that_is_no_number_is_no_multiple(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(4, {}, metadata={"step": "4"})
    folder.save(5, {}, metadata={"step": True})
    folder.save(6, {})
    assert [info.name for info in keep_every(1)(folder.list())] == ["step-00000006"]


@pytest.mark.parametrize("make", [keep_last, keep_every, keep_best])
def test_what_keeps_nothing_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"at least (1|one)"):
        make(0)
    with pytest.raises(ValueError, match='"min" or "max"'):
        keep_best(1, "loss", "lowest")


def test_prune_by_policy_protects_and_returns_paths(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, *range(1, 9))
    fill(folder, 9, run_id="other")
    policy = keep_last(2) | keep_every(4)
    protect = [folder.path(3) + "/"]
    would = folder.prune(policy, run_id="r1", protect=protect, dry_run=True)
    assert would == [folder.path(n) for n in (1, 2, 5, 6)]
    assert len(folder.list()) == 9
    assert folder.prune(policy, run_id="r1", protect=protect) == would
    assert steps_of(folder.list()) == [3, 4, 7, 8, 9]
    assert folder.prune(lambda infos: [], run_id="r1") == [folder.path(n) for n in (3, 4, 7)]
    assert steps_of(folder.list()) == [8, 9]


def test_extra_files_go_with_their_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    extras = ["adapter.bin", "../step-00000002/manifest.json", "absent", 3, "manifest.json", ""]
    fill(folder, 1, extra_files=extras)
    fill(folder, 2, 3, extra_files="manifest.json")
    for name in ("adapter.bin", "notes.txt"):
        (tmp_path / "step-00000001" / name).write_text("x")
    (tmp_path / "step-00000002" / "notes.txt").write_text("x")
    folder.prune([folder.path(2)], run_id="r1")
    assert os.listdir(tmp_path / "step-00000001") == ["notes.txt"]
    assert steps_of(folder.list()) == [2, 3]


def test_links_are_neither_followed_nor_emptied(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "runs")
    fill(folder, 1, 2, extra_files=["link"])
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").write_text("x")
    (tmp_path / "runs" / "step-00000001" / "link").symlink_to(treasure / "gold")
    (tmp_path / "runs" / "step-00000000").symlink_to(treasure)
    folder.prune(keep_last(1), run_id="r1")
    assert (treasure / "gold").read_text() == "x"
    assert (tmp_path / "runs" / "step-00000000").is_symlink()
    assert steps_of(folder.list()) == [2]


def hold_lock(path: str, ready: Any, done: Any) -> None:
    with open_store(path).lock():
        ready.set()
        done.wait()


def test_what_a_save_holds_is_left_alone(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3)
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=hold_lock, args=(folder.path(1), ready, done))
    holder.start()
    assert ready.wait()
    try:
        assert folder.prune(keep_last(1), run_id="r1") == [folder.path(2)]
        assert steps_of(folder.list()) == [1, 3]
    finally:
        done.set()
        holder.join()
    assert folder.prune(keep_last(1), run_id="r1") == [folder.path(1)]


def test_one_that_was_replaced_meanwhile_is_left_alone(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)
    seen = folder.survey()
    save(folder.path(1), {"x": 1}, metadata={"run_id": "r1"})
    folder.survey = lambda: seen  # type: ignore[method-assign]
    assert folder.prune(keep_last(1), run_id="r1") == []
    assert load(folder.path(1)).state == {"x": 1}


def test_a_failed_removal_warns_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3, 4)
    unlink = os.unlink

    def stubborn(path: Any, **options: Any) -> None:
        if "step-00000002" in str(path) or str(path).endswith("shared.json"):
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", stubborn)
    with pytest.warns(CheckpointWarning) as caught:
        removed = folder.prune(keep_last(1), run_id="r1")
    monkeypatch.undo()
    assert removed == [folder.path(1), folder.path(3)]  # their manifests are gone
    texts = [str(warning.message) for warning in caught]
    assert any("could not clean" in text and "step-00000002" in text for text in texts)
    assert any("shared.json" in text for text in texts)
    assert steps_of(folder.list()) == [2, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder.prune(keep_last(1), run_id="r1")  # finishes what was cut short
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def litter(folder: Path, run_id: str | None, files: int = 2) -> list[Path]:
    """Leave the files of a killed save: of another save, without its manifest."""
    other = folder.parent / "elsewhere"
    metadata = {} if run_id is None else {"run_id": run_id}
    manifest = save(other, {"w": torch.ones(4)}, metadata=metadata)
    folder.mkdir(exist_ok=True)
    paths = []
    for entry in manifest.files[:files]:
        (other / entry.name).rename(folder / entry.name)
        paths.append(folder / entry.name)
    (folder / f"manifest-{manifest.id}.tmp").write_bytes(b"{")
    for path in other.iterdir():
        path.unlink()
    other.rmdir()
    return [*paths, folder / f"manifest-{manifest.id}.tmp"]


def test_left_overs_of_this_run_only(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1)
    place = tmp_path / "step-00000001"
    gone = litter(place, "r1")
    stays = [*litter(place, "other"), *litter(place, None)]
    unfinished = [*litter(tmp_path / "step-00000002", "r1"), tmp_path / "step-00000002"]
    others = litter(tmp_path / "step-00000003", "other")
    folder.prune(keep_last(5), run_id="r1")
    assert not any(path.exists() for path in [*gone, *unfinished])
    assert all(path.exists() for path in [*stays, *others])
    assert load(folder.path(1)).state["step"] == 1


def test_a_save_that_was_cut_off_at_once_is_cleaned_up(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1)
    place = tmp_path / "step-00000002"
    for path in litter(place, "r1"):
        os.truncate(path, 0)
    folder.prune(keep_last(5), run_id="r1")
    assert not place.exists()


def test_in_progress_is_left_alone(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2, 3)
    paths = litter(tmp_path / "step-00000004", "r1")
    busy = [folder.path(4), Path(folder.path(1))]
    assert folder.prune(keep_last(1), run_id="r1", in_progress=busy) == [folder.path(2)]
    assert all(path.exists() for path in paths)
    assert steps_of(folder.list()) == [1, 3]


def test_a_reader_never_gets_half_of_what_is_pruned(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 0)
    stop = threading.Event()
    problems: list[BaseException] = []
    seen: set[int] = set()

    def read() -> None:
        other = CheckpointFolder(tmp_path)
        while not stop.is_set():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", CheckpointWarning)
                    state = other.load_latest().state
                assert torch.equal(state["w"], torch.full((300,), float(state["step"])))
                seen.add(state["step"])
            except BaseException as error:
                problems.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 400):
        fill(folder, step)
        folder.prune(keep_last(1), run_id="r1")
        if step >= 24 and (problems or len(seen) > 1):  # the reader had its turn
            break
    stop.set()
    reader.join()
    assert problems == []
    assert len(seen) > 1


@pytest.mark.parametrize("first", ["manifest.json", "tensors-", "objects-"])
def test_half_pruned_is_a_clear_error(tmp_path: Path, first: str) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1)
    next(p for p in (tmp_path / "step-00000001").iterdir() if p.name.startswith(first)).unlink()
    with pytest.raises((CheckpointNotFoundError, CorruptCheckpointError), match="step-00000001"):
        load(folder.path(1))


def test_a_damaged_one_goes_only_when_a_newer_one_is_whole(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    fill(folder, 1, 2)
    lost = {step: next(Path(folder.path(step)).glob("tensors-*")) for step in (1, 2)}
    shelf = {step: path.read_bytes() for step, path in lost.items()}
    for path in lost.values():
        path.unlink()
    assert folder.prune(keep_last(1), run_id="r1") == []
    lost[2].write_bytes(shelf[2])  # found again, say in a backup
    assert folder.prune(keep_last(1), run_id="r1") == [folder.path(1)]
    assert steps_of(folder.list()) == [2]
