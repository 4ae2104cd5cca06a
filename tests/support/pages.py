"""The pages of the documentation, and the Python blocks on them."""

from __future__ import annotations

import re
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from functools import cache
from pathlib import Path

__all__ = ["BLOCK", "PAGES", "ROOT", "assert_prints", "read", "runnable"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```$", re.M | re.S)
# What the block before prints, with "..." for what differs from run to run.
OUTPUT = re.compile(r"\n\n```text\n(.*?)^```$", re.M | re.S)


@cache
def read(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def runnable(page: str) -> list[tuple[int, str, str | None]]:
    """Each block that is to run, with the line on which it begins, and the output shown."""
    text = read(page)
    blocks = [match for match in BLOCK.finditer(text) if not match[1]]
    outputs = [OUTPUT.match(text, match.end()) for match in blocks]
    return [
        (text.count("\n", 0, match.start(2)), match[2], output and output[1])
        for match, output in zip(blocks, outputs, strict=True)
    ]


def assert_prints(shown: str | None, printed: str) -> None:
    """Compare what a block printed with what the page shows, if it does."""
    is_alike = OutputChecker().check_output
    assert shown is None or is_alike(shown, printed, ELLIPSIS | NORMALIZE_WHITESPACE), printed
