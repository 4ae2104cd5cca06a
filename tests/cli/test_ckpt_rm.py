"""``accel ckpt rm``: only checkpoints are removed."""

from __future__ import annotations

import filecmp
import io
import os
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from accel_callbacks.cli.main import main
from checkpoint_io import CheckpointFolder, save, verify
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


def test_cp_says_what_serves_instead(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("cp", place, tmp_path / "copy") == 2
    assert "accel ckpt verify" in capsys.readouterr().err


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
        ("rm", folder.url, "--yes"): 1,
        ("rm", one, "--yes"): 0,
        ("rm", f"{folder.url}/two{evil}", f"{folder.url}/./two{evil}", "--yes"): 1,  # only once
        ("rm", Path(folder.url) / "three", "--yes"): 1,
    }.items():
        assert ckpt(*words) == code, words
        out, err = capsys.readouterr()
        assert out + err
        for text in out.replace("\n", ""), err.replace("\n", ""):
            assert text.isprintable(), (words, text)
        assert not any(line.startswith("valid ") for line in (out + err).splitlines()), words


def test_rm_on_a_store_that_cannot_delete(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over http, which has no way to."""

    class Files(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=place.parent))
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        assert ckpt("show", f"{url}/{place.name}") == 0
        capsys.readouterr()
        assert ckpt("rm", f"{url}/{place.name}", "--yes") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot delete" in line
        verify(place)
        save("memory://cli-cached/one", {"x": 1})
        assert open_store("simplecache::memory://cli-cached/one").can_remove
    finally:
        server.shutdown()
        server.server_close()
