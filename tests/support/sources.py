"""The files of the three packages, which a session of tests reads and parses once."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import layout_figures  # noqa: E402

__all__ = ["modules"]


@cache
def modules() -> dict[str, layout_figures.Module]:
    """Return all modules by dotted name, with their text and tree."""
    return layout_figures.read_modules(ROOT)
