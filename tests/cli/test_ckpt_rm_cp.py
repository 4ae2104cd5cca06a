"""``accel ckpt rm`` and ``cp``: only checkpoints are removed, and a copy is complete or none."""

from __future__ import annotations

import filecmp
import io
import os
import signal
import subprocess
import sys
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from accel_callbacks.cli import ckpt_copy
from accel_callbacks.cli.main import main
from checkpoint_io import CheckpointError, CheckpointFolder, load, save, verify
from checkpoint_io.format.names import MANIFEST
from checkpoint_io.storage import open_store


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint of several files, with a file of others."""
    path = tmp_path / "runs" / "step-00000001"
    state = {"w": torch.arange(600_000.0), "v": torch.ones(300_000), "empty": torch.zeros(0, 3)}
    metadata = {"run_id": "r1", "step": 1, "extra_files": ["extra.json"]}
    save(path, state, metadata=metadata, max_shard_size="2MB")
    (path / "extra.json").write_text("{}")
    return path


def ckpt(*words: Any) -> int:
    return main(["ckpt", *map(str, words)])


def same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    there = sorted(path.name for path in other.iterdir())
    return there == names and filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


# --- rm -------------------------------------------------------------------------------------


def test_rm_asks_and_removes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(os.devnull) as nobody, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", nobody)
        assert ckpt("rm", place) == 2
    assert "--yes" in capsys.readouterr().err
    assert ckpt("rm", place, "--dry-run") == 0
    verify(place)
    (place / "mine.txt").touch()
    assert ckpt("rm", place, "--yes") == 0
    out, err = capsys.readouterr()
    assert f"removed {place}\n" in out
    assert "mine.txt" in err
    assert [path.name for path in place.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("n\n", False), ("", False)])
def test_rm_takes_an_answer(answer: str, gone: bool, place: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", Terminal(answer))
        assert ckpt("rm", place) == (0 if gone else 1)
    assert place.exists() != gone


def test_rm_leaves_what_is_no_checkpoint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = place.parent.parent / "data"
    other.mkdir()
    (other / "manifest.json").write_text('{"name": "a web page"}')
    empty = place.parent.parent / "empty"
    empty.mkdir()
    for wrong in (other, empty, empty / "absent", place.parent):
        assert ckpt("rm", place, wrong, "--yes", "--unfinished") == 1, wrong
        assert "nothing was removed" in capsys.readouterr().err
        verify(place)  # nor the valid one next to it
    assert (other / "manifest.json").is_file()
    assert ckpt("rm", place.parent, "--yes") == 1
    assert f"such as {place}" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [True, False])
def test_rm_of_what_is_left_of_a_save(broken: bool, place: Path) -> None:
    if broken:
        os.truncate(place / MANIFEST, 10)
    else:
        (place / MANIFEST).unlink()
    (place / "extra.json").unlink()
    assert ckpt("rm", place, "--yes") == 1
    assert len(list(place.iterdir())) > 2
    assert ckpt("rm", place, "--yes", "--unfinished") == 0
    assert not place.exists()


def test_rm_on_a_store() -> None:
    save("memory://cli-rm/one", {"x": torch.ones(3)})
    save("memory://cli-rm/two", {"x": torch.ones(3)})
    assert ckpt("rm", "memory://cli-rm/one", "--yes") == 0
    assert [info.name for info in CheckpointFolder("memory://cli-rm").list()] == ["two"]


# --- cp -------------------------------------------------------------------------------------


def test_cp_into_a_folder_takes_the_name_from_a_path_of_windows(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.rename(tmp_path / "runs\\step-00000001")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sep", "\\")
    assert ckpt("cp", "runs\\step-00000001", "backup/") == 0
    assert os.listdir(tmp_path / "backup") == ["step-00000001"]


def test_cp_there_and_back(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckpt_copy, "WINDOW", 2 << 20)
    assert ckpt("cp", place, "memory://cli-cp/") == 0
    verify("memory://cli-cp/step-00000001")
    assert ckpt("cp", "memory://cli-cp/step-00000001", tmp_path / "back", "--read-back") == 0
    assert same(place, tmp_path / "back")
    assert torch.equal(load(tmp_path / "back").state["w"], torch.arange(600_000.0))
    capsys.readouterr()
    assert ckpt("cp", place, tmp_path / "back") == 0
    assert "already" in capsys.readouterr().err
    assert ckpt("cp", place, place) == 0


def test_cp_over_another_one_is_refused(place: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", {"x": 1})
    assert ckpt("cp", place, tmp_path / "other") == 1
    assert load(tmp_path / "other").state == {"x": 1}


def test_cp_to_a_folder_of_other_things_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").touch()
    for target in (notes, place.parent):
        before = sorted(target.iterdir())
        assert ckpt("cp", place, target) == 1
        assert "a / at the end" in capsys.readouterr().err
        assert sorted(target.iterdir()) == before
    monkeypatch.chdir(place)
    assert ckpt("cp", ".", f"{notes}/") == 0
    assert same(place, notes / place.name)


def test_cp_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("cp", tmp_path, tmp_path / "copy") == 1
    assert "no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_cp_of_damage_is_no_checkpoint_and_goes_on_when_mended(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goal = tmp_path / "copy"
    files = sorted(place.glob("tensors-*"))
    assert len(files) > 1
    flip(files[-1], 1_000_000)
    assert ckpt("cp", place, goal) == 1
    err = capsys.readouterr().err
    assert files[-1].name in err
    assert "in tensor" in err
    assert not (goal / MANIFEST).exists()
    assert files[0].name in {path.name for path in goal.iterdir()}
    flip(goal / files[0].name, 5000)  # and what is there already is not believed
    flip(files[-1], 1_000_000)
    assert ckpt("cp", place, goal) == 0
    assert same(place, goal)


def test_cp_that_is_killed_goes_on(tmp_path: Path) -> None:
    origin, goal = tmp_path / "big", tmp_path / "copy"
    save(
        origin,
        {str(n): torch.full((2_000_000,), float(n)) for n in range(16)},
        max_shard_size="8MB",
    )
    words = [sys.executable, "-m", "accel_callbacks.cli", "ckpt", "cp", str(origin), str(goal)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list(goal.glob("tensors-*"))) < 2:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (goal / MANIFEST).exists()
    assert ckpt("cp", origin, goal) == 0
    assert same(origin, goal)


def test_cp_passes_options_to_each_side(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cp", place, "memory://cli-options/a"]
    assert ckpt(*words, "--target_option", "no_such=1", "--storage_option", "auto_mkdir=true") == 0
    assert ckpt(*words, "--target_option", "wrong") == 2
    assert "KEY=VALUE" in capsys.readouterr().err


# --- names of one place, and names of others ------------------------------------------------


def test_rm_of_the_same_checkpoint_twice_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.parent)
    Path("link").symlink_to(place.name)
    for other in (f"./{place.name}", place, f"{place.name}/", "link", f"file://{place}"):
        assert ckpt("rm", place.name, other, "--yes") == 1
        out, err = capsys.readouterr()
        assert f"{place.name} and {other} are the same checkpoint" in err
        assert "nothing was removed" in err
        assert out == ""
        verify(place)
    save("memory://cli-twice/a", {"x": 1})
    assert ckpt("rm", "memory://cli-twice/a", "memory:///cli-twice/a/", "--yes") == 1
    verify("memory://cli-twice/a")
    assert ckpt("rm", place, place, "--yes") == 0  # the same words are one
    assert not place.exists()


def test_cp_into_itself_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.parent)
    (tmp_path / "link").symlink_to(place)
    before = sorted(place.iterdir())
    for target in (
        f"{place.name}/",
        f"{place.name}/sub",
        place / "a" / "b",
        tmp_path / "link" / "c",
    ):
        assert ckpt("cp", place.name, target) == 1
        assert "cannot be copied into itself" in capsys.readouterr().err
        assert sorted(place.iterdir()) == before
    verify(place)
    save("memory://cli-itself/a", {"x": 1})
    assert ckpt("cp", "memory://cli-itself/a", "memory://cli-itself/a/b") == 1
    assert ckpt("cp", "memory://cli-itself/a", "memory://cli-itself/ab") == 0
    verify("memory://cli-itself/ab")


def test_names_that_would_control_the_terminal_are_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of checkpoints, runs, metrics and tensors in all that the command prints."""
    evil = "\x1b[2J\x9b1m\nvalid \u202e"
    folder = CheckpointFolder(tmp_path / f"runs{evil}")
    for number, name in enumerate((f"one{evil}", f"two{evil}", f"old{evil}")):
        score = {"monitor": f"loss{evil}", "value": 0.5}
        metadata = {"run_id": f"id{evil}{number % 2}", "run_name": f"run{evil}", "score": score}
        save(Path(folder.url) / name, {f"w{evil}": torch.ones(1)}, metadata=metadata)
        (Path(folder.url) / name / f"mine{evil}").touch()
    save(Path(folder.url) / "three", {"x": 1}, metadata={"step": evil, "score": evil})
    os.truncate(Path(folder.url) / "three" / MANIFEST, 20)
    one = Path(folder.url) / f"one{evil}"
    for words, code in {
        ("ls", folder.url): 0,
        ("ls", folder.url, "--json"): 0,
        ("ls", one): 1,
        ("latest", folder.url): 0,
        ("latest", tmp_path / evil): 1,
        ("show", folder.url): 0,
        ("show", one): 0,
        ("show", tmp_path / evil): 1,
        ("verify", folder.url): 1,
        ("prune", folder.url, "--keep-last", "1"): 2,
        ("prune", folder.url, "--keep-last", "1", "--all-runs", "--dry-run"): 0,
        ("cp", one, folder.url): 1,
        ("cp", one, f"{folder.url}/copy{evil}"): 0,
        ("cp", one, f"{folder.url}/three"): 1,
        ("rm", folder.url, "--yes"): 1,
        ("rm", one, "--dry-run"): 0,
        ("rm", one, "--yes"): 0,
        ("rm", f"{folder.url}/two{evil}", f"{folder.url}/./two{evil}", "--yes"): 1,
        ("rm", Path(folder.url) / "three", "--yes"): 1,
    }.items():
        assert ckpt(*words) == code, words
        out, err = capsys.readouterr()
        assert out + err
        for text in out.replace("\n", ""), err.replace("\n", ""):
            assert text.isprintable(), (words, text)
        assert not any(line.startswith("valid ") for line in (out + err).splitlines()), words


def test_rm_and_prune_on_a_store_that_cannot_delete(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over http, which has no way to: at once, before the first request."""
    asked: list[str] = []

    class Files(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            asked.append(format % args)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=place.parent))
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        assert ckpt("show", f"{url}/{place.name}") == 0
        asked.clear()
        for words in (
            ("rm", f"{url}/{place.name}", "--yes"),
            ("rm", f"{url}/{place.name}", "--dry-run"),
            ("rm", place, f"{url}/absent", "--yes", "--unfinished"),
            ("rm", f"simplecache::{url}/{place.name}", "--yes"),
            ("prune", url, "--keep-last", "1"),
        ):
            assert ckpt(*words) == 1
            assert "http:// cannot delete: remove it where it is kept" in capsys.readouterr().err
        verify(place)
        assert asked == []
        with pytest.raises(CheckpointError, match="cannot delete"):
            open_store(f"{url}/{place.name}").remove(MANIFEST)
        save("memory://cli-cached/one", {"x": 1})
        assert open_store("simplecache::memory://cli-cached/one").can_remove
    finally:
        server.shutdown()
        server.server_close()
