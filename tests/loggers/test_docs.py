"""The Python blocks of the tracker pages run, in order, as one script a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loggers import registry

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["reference/trackers.md", "how-to/write-a-tracker.md"])
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "page"})
