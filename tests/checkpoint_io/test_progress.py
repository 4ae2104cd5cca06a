from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import TransferProgress, load, save


def test_counts_from_many_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with TransferProgress("loading", 8000, enabled=True) as progress:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: [progress.add(1) for _ in range(1000)], range(8)))
        assert progress.done_bytes == 8000
    shown = capsys.readouterr().err
    assert "loading" in shown
    assert "B/s" in shown


@pytest.mark.parametrize("enabled", [None, False])
def test_silent_where_nobody_looks(
    enabled: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with TransferProgress("loading", 10, enabled) as progress:
        progress.add(10)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with TransferProgress("loading", 10) as progress:
        progress.add(10)
    assert "loading" not in capsys.readouterr().err
    monkeypatch.setattr("checkpoint_io.progress._DELAY", 0)
    with TransferProgress("loading", 10) as progress:
        progress.add(10)
    assert "loading" in capsys.readouterr().err


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        TransferProgress("loading", 10, enabled=True).__enter__()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with TransferProgress("loading", 10):
        pass


@pytest.mark.parametrize("options", [{}, {"into": True}, {"verify": "full"}])
def test_a_load_shows_its_bytes(
    tmp_path: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, {"w": torch.ones(1000)})
    capsys.readouterr()
    if "into" in options:
        options = {"into": {"w": torch.zeros(1000)}}
    load(tmp_path, progress=True, **options)
    assert "loading" in (shown := capsys.readouterr().err)
    assert ("verifying" in shown) == ("verify" in options)
    load(tmp_path, progress=False, **options)
    assert capsys.readouterr().err == ""
