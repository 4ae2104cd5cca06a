"""File names that every system takes, and files that are open elsewhere."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

import checkpoint_io.local_files
import loggers.multimedia.files
from loggers import JSONLTracker, RunInfo, read_jsonl
from loggers.file_names import file_name, portable_path
from loggers.multimedia.files import MediaFolder
from loggers.trackers import dvclive, line_file
from loggers.trackers.csv import CSVTracker

RESERVED = ["con", "AUX", "nul", "prn", "com1", "LPT9", "con.txt", "nul.a.b", "aux .x", "conin$"]
ODD = ["run.", "run ", "..", ".", "", " ", "a:b", "a\\b", "a<b>", 'a"b', "a|b", "a?", "a*", "a\tb"]


def windows_refuses(part: str) -> bool:
    stem = part.partition(".")[0].rstrip().casefold()
    device = stem in {"con", "prn", "aux", "nul", "com1", "lpt9", "conin$", "conout$"}
    return device or part.endswith((".", " ")) or any(c in part for c in '<>:"|?*\\\t') or not part


@pytest.mark.parametrize("name", [*RESERVED, *ODD])
def test_names_that_windows_refuses_are_made_safe(name: str) -> None:
    assert windows_refuses(name)
    assert not windows_refuses(file_name(name))
    parts = portable_path(f"a/{name}/b").split("/")
    assert not any(map(windows_refuses, parts))
    assert (parts[0], parts[-1]) == ("a", "b")


def test_names_stay_apart_where_case_does_not_count() -> None:
    names = ["loss", "Loss", "LOSS", "a/b", "a=2Fb", "a=2fb", "val.", "val=2E", *RESERVED, *ODD]
    names += ["x" * 200, "X" * 200, "x" * 199 + "X"]
    assert len({file_name(name).casefold() for name in names}) == len(names)


@pytest.mark.parametrize("name", ["loss", "val-1_a.b", "a b", "12"])
def test_plain_names_stay(name: str) -> None:
    assert file_name(name) == portable_path(name) == name


def test_media_of_names_that_differ_in_case_are_two_files(tmp_path: Path) -> None:
    folder = MediaFolder(str(tmp_path), "media", "con.")
    paths = [folder.save("images", name, 1, 0, ".png", name.encode()) for name in ("Loss", "loss")]
    assert paths[0].casefold() != paths[1].casefold()
    assert [(tmp_path / path).read_text() for path in paths] == ["Loss", "loss"]
    again = MediaFolder(str(tmp_path), "media", "con.")  # in another order
    assert again.save("images", "loss", 1, 0, ".png", b"loss") == paths[1]
    assert again.save("images", "Loss", 1, 0, ".png", b"Loss") == paths[0]


def test_images_of_a_tracker_are_recorded_with_their_files(tmp_path: Path) -> None:
    tracker = JSONLTracker()
    tracker.start(RunInfo("digits", str(tmp_path), "Aux"))
    pixels = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    tracker.log_images({"Loss": pixels, "loss": pixels}, 3)
    tracker.finish()
    (record,) = read_jsonl(tmp_path / "metrics.jsonl", kind="images")
    files = [one for value in record["values"].values() for one in value]
    assert len({file.casefold() for file in files}) == 2
    assert all((tmp_path / file).is_file() for file in files)


def test_a_file_that_was_not_written_whole_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, path: str, mode: str) -> None:
            self.file = open(path, mode)  # noqa: SIM115

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[:1])
            self.file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loggers.multimedia.files, "open", Full, raising=False)
    with pytest.raises(OSError, match="No space"):
        MediaFolder(str(tmp_path), "media", "a").save("images", "b", 1, 0, ".png", b"12")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.fixture
def file_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renames over a file are refused, as while another program has it open."""

    def refuses(old: str, new: str) -> None:
        error = PermissionError(errno.EACCES, "Access is denied", new)
        error.winerror = 32  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(os, "replace", refuses)
    monkeypatch.setattr(checkpoint_io.local_files, "_PAUSES", (0,))


def test_a_log_that_is_open_elsewhere_stays_as_it_was(tmp_path: Path, file_in_use: None) -> None:
    lines = line_file.LocalLines(str(tmp_path / "log"))
    lines.add(b"1\n")
    lines.flush()
    with pytest.raises(PermissionError, match="another program has the file open"):
        lines.rewrite([b"2\n"])
    lines.add(b"3\n")
    lines.close()
    assert (tmp_path / "log").read_bytes() == b"1\n3\n"
    assert os.listdir(tmp_path) == ["log"]


def test_a_metric_that_is_open_elsewhere_leaves_no_part(tmp_path: Path, file_in_use: None) -> None:
    path = tmp_path / "loss.tsv"
    path.write_text("step\tloss\n1\t2\n")
    with pytest.raises(PermissionError, match="another program has the file open"):
        dvclive._rewrite(path, ["step", "loss"], [])
    assert os.listdir(tmp_path) == ["loss.tsv"]


@pytest.mark.parametrize("tracker", [JSONLTracker(), CSVTracker()], ids=["jsonl", "csv"])
def test_a_log_is_synced_at_its_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: JSONLTracker | CSVTracker
) -> None:
    synced = []
    monkeypatch.setattr(line_file, "sync_file", lambda descriptor: synced.append(descriptor))
    tracker.start(RunInfo("digits", str(tmp_path), "a1"))
    for step in range(3):
        tracker.log({"loss": 1.0}, step)
        tracker.flush()
    rows = len(synced)
    tracker.finish()
    assert len(synced) == rows + 1
    assert rows <= 1  # at most for a header that has grown


@pytest.mark.parametrize("path", [r"C:\out\model", "C:\\out\\model\\"])
def test_an_artifact_of_windows_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    tracker = JSONLTracker()
    tracker.start(RunInfo("digits", str(tmp_path), "a1"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "sep", "\\")
        tracker.log_artifact(path)
    tracker.finish()
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [record["name"] for record in records if record["type"] == "artifact"] == ["model"]
