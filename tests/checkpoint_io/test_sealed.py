"""Folders that other programs have written, and their seals."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_io import CheckpointNotFoundError, CorruptCheckpointError
from checkpoint_io.folder.sealed import SEAL, check_seal, seal_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 40000)  # more than a buffer
    (tmp_path / "shards" / "rank_0").write_bytes(b"one")
    (tmp_path / "empty").write_bytes(b"")
    seal_folder(tmp_path, {"step": 3})
    return tmp_path


def test_what_is_sealed_is_whole_and_what_comes_later_is_not_looked_at(folder: Path) -> None:
    (folder / "README.md").write_text("later")
    assert check_seal(folder) == {"step": 3}
    assert not list(folder.glob("*.tmp"))


def test_a_folder_without_a_seal_has_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"has no seal.json: it was not written to"):
        check_seal(tmp_path)


@pytest.mark.parametrize("full", [True, False])
def test_a_file_that_is_missing_or_cut_off_is_named(folder: Path, full: bool) -> None:
    (folder / "shards" / "rank_0").write_bytes(b"on")
    with pytest.raises(CorruptCheckpointError, match=r"shards/rank_0 has 2 bytes, .* with 3"):
        check_seal(folder, full=full)
    (folder / "shards" / "rank_0").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"shards/rank_0 is missing"):
        check_seal(folder, full=full)


def test_another_byte_is_found_by_its_checksum(folder: Path) -> None:
    with (folder / "weights").open("r+b") as file:
        file.seek(9_000_000)
        file.write(b"\xff")
    check_seal(folder, full=False)
    with pytest.raises(CorruptCheckpointError, match=r"bytes of weights are not those"):
        check_seal(folder)


def test_a_seal_that_is_damaged_or_of_another_version_is_refused(folder: Path) -> None:
    data = (folder / SEAL).read_bytes()
    (folder / SEAL).write_bytes(data.replace(b'"step":3', b'"step":4'))
    with pytest.raises(CorruptCheckpointError, match=r"seal.json is damaged"):
        check_seal(folder)
    (folder / SEAL).write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"seal.json is damaged"):
        check_seal(folder)
