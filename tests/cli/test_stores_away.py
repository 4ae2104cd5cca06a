"""A store that cannot be reached is said to be that: what is in it may be whole."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from accel_callbacks.cli.main import main
from accel_callbacks.journal import Journal
from checkpoint_io import save
from tests.support.journals import write_run


class Away(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store in memory, some of whose requests find no route to it."""

    protocol = ("away",)
    store: dict[str, Any] = {}  # noqa: RUF012  # as the class above has it
    pseudo_dirs = [""]  # noqa: RUF012
    lost: tuple[str, ...] = ()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("away://", "memory://")))

    def _check(self, request: str) -> None:
        if request in self.lost:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

    def ls(self, *args: Any, **options: Any) -> Any:
        self._check("list")
        return super().ls(*args, **options)

    def info(self, *args: Any, **options: Any) -> Any:
        self._check("list")
        return super().info(*args, **options)

    def _open(self, *args: Any, **options: Any) -> Any:
        self._check("read")
        return super()._open(*args, **options)

    def cat_file(self, *args: Any, **options: Any) -> Any:
        self._check("read")
        return super().cat_file(*args, **options)


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store with a run and a checkpoint, which is lost by setting ``Away.lost``."""
    fsspec.register_implementation("away", Away, clobber=True)
    write_run(tmp_path)
    fs = fsspec.filesystem("away")
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        fs.pipe(f"/x/{file.relative_to(tmp_path).as_posix()}", file.read_bytes())
    save("away://x/step", {"w": torch.ones(2)})
    monkeypatch.setattr(Away, "lost", ())
    yield "away://x"
    Away.store.clear()


@pytest.mark.parametrize("lost", [("list", "read"), ("read",)], ids=["all", "reads"])
def test_a_checkpoint_that_cannot_be_reached_is_not_damaged(
    lost: tuple[str, ...],
    away: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ckpt", "verify", f"{away}/step"]) == 0
    monkeypatch.setattr(Away, "lost", lost)
    capsys.readouterr()
    assert main(["ckpt", "verify", f"{away}/step"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("unreachable away://x/step: ")
    assert "No route to host" in err
    assert "damaged" not in err
    assert main(["ckpt", "verify", f"{away}/step", "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert verdict["status"] == "unreachable"


def test_a_run_that_cannot_be_reached_is_not_damaged(
    away: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", away]) == 0
    monkeypatch.setattr(Away, "lost", ("read",))
    capsys.readouterr()
    assert main(["runs", away]) == 1
    out = capsys.readouterr().out
    assert out.count("unreachable") >= 2, "in the table, and below it"
    assert "No route to host" in out
    assert "damaged" not in out
    monkeypatch.setattr(Away, "lost", ("list", "read"))
    for words in (["runs", away], ["report", away], ["data", away, "--step", "1"]):
        assert main(words) == 1
        assert "is unreachable (OSError: [Errno 113] No route to host" in capsys.readouterr().err
    with pytest.raises(ConnectionError):
        Journal.read(away)
