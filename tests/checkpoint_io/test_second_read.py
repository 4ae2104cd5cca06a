"""Bytes that are not the ones saved are read once more before a file is called damaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from checkpoint_io import (
    CheckpointFolder,
    CheckpointWarning,
    CorruptCheckpointError,
    load,
    save,
    verify,
)
from checkpoint_io.storage.fsspec_store import FsspecStore
from checkpoint_io.storage.local_read import LocalReader

FILES = ["tensors-", "objects-", "manifest.json"]


@pytest.fixture
def flips(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Flip a bit of what is read of some file, in memory: the file itself stays as it is."""

    def begin(part: str, times: int) -> list[str]:
        done: list[str] = []

        def flipped(data: memoryview[int], path: str) -> memoryview[int]:
            if part not in path or len(done) >= times or not len(data):
                return data
            done.append(path)
            changed = bytearray(data)
            changed[len(changed) // 2] ^= 4
            return memoryview(changed)

        local, remote = LocalReader.read, FsspecStore._read

        def read_local(self: Any, begin: int, end: int) -> memoryview[int]:
            return flipped(local(self, begin, end), self._path)

        def read_remote(self: Any, name: str, begin: int, end: int) -> memoryview[int]:
            return flipped(remote(self, name, begin, end), name)

        monkeypatch.setattr(LocalReader, "read", read_local)
        monkeypatch.setattr(FsspecStore, "_read", read_remote)
        return done

    return begin


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "step": step}


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://second-read{tmp_path}"


@pytest.mark.parametrize("part", FILES)
def test_one_flip_is_read_again(url: str, part: str, flips: Any) -> None:
    save(url, state(1))
    done = flips(part, 1)
    assert load(url).state["step"] == 1
    assert len(done) == 1
    target = torch.zeros(3000)
    done = flips(part, 1)
    load(url, into={"w": target})
    assert len(done) == 1
    assert torch.equal(target, state(1)["w"])
    done = flips(part, 1)
    verify(url)
    assert len(done) == 1


@pytest.mark.parametrize("part", FILES)
def test_two_flips_are_damage_under_a_public_name(url: str, part: str, flips: Any) -> None:
    save(url, state(1))
    flips(part, 99)
    with pytest.raises(CorruptCheckpointError, match=part) as caught:
        load(url)
    assert type(caught.value) is CorruptCheckpointError


@pytest.mark.parametrize("part", FILES)
def test_one_flip_takes_no_older_checkpoint(url: str, part: str, flips: Any) -> None:
    folder = CheckpointFolder(url)
    for step in (1, 2):
        folder.save(step, state(step))
    done = flips(part, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CheckpointFolder(url).load_latest().state["step"] == 2
    assert len(done) == 1


def test_the_warning_of_a_fallback_has_the_public_name(tmp_path: Path, flip_bit: Any) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step))
    damaged = next(Path(folder.path(2)).glob("tensors-*"))
    flip_bit(damaged, damaged.stat().st_size - 1)
    with pytest.warns(CheckpointWarning, match="passed over .*CorruptCheckpointError") as said:
        assert folder.load_latest().state["step"] == 1
    assert "_DamageError" not in str(said[0].message)


def test_one_flip_in_the_manifest_that_a_save_replaces_is_no_conflict(url: str, flips: Any) -> None:
    save(url, state(1))
    done = flips("manifest.json", 1)
    save(url, state(2))
    assert len(done) == 1
    assert load(url).manifest.generation == 2


@pytest.mark.parametrize("part", FILES)
def test_a_damaged_copy_of_a_caching_driver_is_not_asked_again(
    tmp_path: Path, flip_bit: Any, part: str
) -> None:
    """The driver keeps what came damaged over the wire, and would return it again and again."""
    target = f"memory://cached{tmp_path}"
    save(target, state(1))
    copies = tmp_path / "copies"
    options = {"target_protocol": "memory", "cache_storage": str(copies)}
    url = f"filecache://cached{tmp_path}"
    assert load(url, storage_options=options).state["step"] == 1
    fs = fsspec.filesystem("filecache", **options)
    names = [one.name for one in load(url, storage_options=options).manifest.files]
    name = next(one for one in [*names, "manifest.json"] if part in one)
    copy = Path(fs._check_file(f"cached{tmp_path}/{name}")[1])
    assert copy.parent == copies
    flip_bit(copy, copy.stat().st_size - 1)
    assert load(url, storage_options=options).state["step"] == 1


def test_one_flip_while_a_save_looks_back_is_no_conflict(url: str, flips: Any) -> None:
    done = flips("manifest.json", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(url, state(1))  # nothing was there: it reads only the manifest that it has written
    assert len(done) == 1
    assert load(url).state["step"] == 1
