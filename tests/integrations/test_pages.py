"""The how-to page and the example run as they stand, with the real packages."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: scripts/test_adapters")

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def test_the_how_to_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CPU", "1")
    blocks = BLOCK.findall((ROOT / "docs/how-to/use-lightning-callbacks.md").read_text())
    assert len(blocks) == 3
    namespace = {"__name__": "page"}
    for block in blocks:
        exec(block, namespace)


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example", "--epochs", "3", "--cpu"])
    runpy.run_path(str(ROOT / "examples/lightning_callbacks.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert float(re.search(r"accuracy ([\d.]+) %", printed)[1]) > 80
    kept = sorted(path.name for path in Path("runs/lightning_callbacks/best").glob("[!.]*"))
    assert len(kept) == 2
    assert all(name in printed for name in kept)
    assert "loaded the best, of epoch" in printed
