from __future__ import annotations

import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_io.storage.local
from checkpoint_io import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    load,
    read_manifest,
    save,
    verify,
)
from checkpoint_io.format.names import save_id_of
from tests.support import warm


def test_every_flipped_bit_is_found_and_named(
    tmp_path: Path, state: dict[str, Any], flip_bit: Any
) -> None:
    good = tmp_path / "good"
    save(good, state, local_state={"rng": torch.arange(9)}, max_shard_size=3000)
    names = sorted(path.name for path in good.iterdir())
    assert len(names) == 6
    for name in names:
        size = (good / name).stat().st_size
        for at in {0, 9, size // 3, size // 2, size - 1}:
            bad = tmp_path / "bad"
            shutil.copytree(good, bad)
            flip_bit(bad / name, at)
            with pytest.raises(CorruptCheckpointError, match=name):
                load(bad)
            with pytest.raises(CorruptCheckpointError, match=name):
                verify(bad)
            shutil.rmtree(bad)


def test_damage_names_the_tensor(tmp_path: Path, state: dict[str, Any], flip_bit: Any) -> None:
    manifest = save(tmp_path, state)
    flip_bit(tmp_path / manifest.files[0].name, manifest.tensors["model/w"].chunks[0].begin)
    with pytest.raises(CorruptCheckpointError, match="model/w"):
        verify(tmp_path)
    verify(tmp_path, full=False)


@pytest.mark.parametrize("damage", ["truncate", "extend", "remove", "link", "fifo", "folder"])
def test_file_that_is_not_the_one_saved(tmp_path: Path, state: dict[str, Any], damage: str) -> None:
    place = tmp_path / "c"
    manifest = save(place, state)
    for entry in manifest.files:
        copy = tmp_path / "copy"
        shutil.copytree(place, copy)
        file = copy / entry.name
        data = file.read_bytes()
        file.unlink()
        if damage == "truncate":
            file.write_bytes(data[:-1])
        elif damage == "extend":
            file.write_bytes(data + b" ")
        elif damage == "link":
            file.symlink_to(place / entry.name)
        elif damage == "fifo":
            os.mkfifo(file)
        elif damage == "folder":
            file.mkdir()
        for attempt in (load, verify, lambda url: verify(url, full=False)):
            with pytest.raises(CorruptCheckpointError, match=entry.name):
                attempt(copy)
        shutil.rmtree(copy)


def test_no_checkpoint_is_told_from_an_unfinished_one(tmp_path: Path, state: Any) -> None:
    with pytest.raises(CheckpointNotFoundError, match="check the path"):
        load(tmp_path / "nothing")
    save(tmp_path, state)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match="never finished"):
        load(tmp_path)


def test_overwrite_replaces_and_cleans(tmp_path: Path, state: dict[str, Any]) -> None:
    first = save(tmp_path, state)
    (tmp_path / "notes.txt").write_text("mine")
    second = save(tmp_path, {**state, "step": 8})
    assert (first.generation, second.generation) == (1, 2)
    expected = {"manifest.json", "notes.txt", *(entry.name for entry in second.files)}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert load(tmp_path).state["step"] == 8


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_at_any_file_leaves_the_old_one(
    tmp_path: Path, state: Any, monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException
) -> None:
    """The n-th fsync fails: of the tensors, of the JSON, of the manifest's temporary file."""
    save(tmp_path, state)
    before = {path.name for path in tmp_path.iterdir()}
    count = 0

    def failing(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == call:
            raise error

    monkeypatch.setattr(checkpoint_io.storage.local, "sync_file", failing)
    kind = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind, match="No space" if isinstance(error, OSError) else None):
        save(tmp_path, {**state, "step": 8})
    assert {path.name for path in tmp_path.iterdir()} == before
    assert load(tmp_path).state["step"] == 7


@pytest.mark.parametrize("error", [OSError("answer lost"), KeyboardInterrupt()])
def test_error_after_the_commit_took_place_keeps_the_new_one(
    tmp_path: Path, state: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    first = save(tmp_path, state)
    real = os.replace

    def replace_then_raise(old: str, new: str) -> None:
        real(old, new)
        raise error

    monkeypatch.setattr(os, "replace", replace_then_raise)
    ends = nullcontext() if isinstance(error, Exception) else pytest.raises(KeyboardInterrupt)
    returned = []
    with ends, pytest.warns(CheckpointWarning, match="power cut"):
        returned.append(save(tmp_path, {**state, "step": 8}))
    if isinstance(error, Exception):
        assert returned == [read_manifest(tmp_path)]
    verify(tmp_path)
    assert load(tmp_path).state["step"] == 8
    # the rename was not synced: after a power cut the old manifest may be back, and needs these
    assert all((tmp_path / entry.name).exists() for entry in first.files)


def test_real_disk_full_leaves_the_old_one(tmp_path: Path, state: Any) -> None:
    """A limit on file size makes the kernel itself refuse the write."""
    save(tmp_path, state)
    before = {path.name for path in tmp_path.iterdir()}
    code = (
        "import resource, signal, sys, torch, checkpoint_io\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "try: checkpoint_io.save(sys.argv[1], {'small': 1, 'big': torch.ones(2**20)})\n"
        "except checkpoint_io.CheckpointError as e: print('refused', e)\n"
    )
    run = warm.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "refused" in run.stdout
    assert "nothing was committed" in run.stdout
    assert {path.name for path in tmp_path.iterdir()} == before
    assert load(tmp_path).state["step"] == 7


def test_planted_link_is_not_followed_on_save(
    tmp_path: Path, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import checkpoint_io.saver.save as job
    from checkpoint_io.format.names import tensors_name

    victim = tmp_path / "victim"
    victim.write_text("precious")
    place = tmp_path / "c"
    place.mkdir()
    (place / tensors_name("ab" * 8, 0, 1)).symlink_to(victim)
    monkeypatch.setattr(job, "new_save_id", lambda: "ab" * 8)
    with pytest.raises(CheckpointError):
        save(place, state)
    assert victim.read_text() == "precious"


def test_all_files_carry_the_id(tmp_path: Path, state: Any) -> None:
    manifest = save(tmp_path, state)
    assert {save_id_of(entry.name) for entry in manifest.files} == {manifest.id}
    assert read_manifest(tmp_path).id == manifest.id
