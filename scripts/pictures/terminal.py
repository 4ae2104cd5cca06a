"""Terminals as `record.py` has recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from svg import Picture

RECORDINGS = Path(__file__).resolve().parent / "recordings"
PROMPT = ["$ ", "good-text bold"]
ADVANCE, ROW, GAP = 7.7, 21, 9  # a gap before each command


def read(name: str) -> dict[str, Any]:
    """Return a recording."""
    recording: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text("utf-8"))
    return recording


def is_command(line: list[list[str]]) -> bool:
    """Return whether a line begins with a prompt."""
    return line[:1] == [PROMPT]


def terminal(name: str) -> Picture:
    """Draw the lines of a recording."""
    recording = read(name)
    columns = max(sum(len(words) for words, _ in line) for line in recording["lines"])
    width = round(40 + columns * ADVANCE)
    commands = sum(is_command(line) for line in recording["lines"])
    height = 43 + ROW * len(recording["lines"]) + GAP * commands
    picture = Picture(width, height, recording["title"])
    for number in range(3):
        picture.rect(20 + number * 18, 14, 10, 10, "peer", radius=5)
    y = 45
    for line in recording["lines"]:
        y += GAP if is_command(line) else 0
        picture.spans(20, y, line, ADVANCE)
        y += ROW
    return picture
