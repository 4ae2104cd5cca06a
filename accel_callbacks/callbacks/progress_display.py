"""Displays of progress: drawn by rich or tqdm on a terminal, printed as lines elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from accel_callbacks.terminal_text import columns_variable, terminal_width

if TYPE_CHECKING:
    from rich.console import Console, Group

__all__ = [
    "Display",
    "Line",
    "LineDisplay",
    "RichDisplay",
    "TqdmDisplay",
    "can_redraw",
    "display_on",
]

#: Texts and their styles, in the names of rich's theme.
Line = list[tuple[str, str]]

_LINE_WIDTH = 100  # where there is no terminal, and no COLUMNS
_ROWS = 24  # more than are ever drawn
_NO_CURSOR = ("dumb", "unknown")  # TERM of terminals that only scroll


class Display(Protocol):
    """Show the lines of passes over loaders."""

    seconds: float  # between two drawings
    redraws: bool  # in place, so that the start and the end of an evaluation are drawn too
    bar: tuple[str, str] | None  # characters of its done and of its open part

    def width(self) -> int:
        """Return how many columns a line may have."""

    def draw(self, passes: Sequence[Sequence[Line]]) -> None:
        """Show the lines of each open pass, the outer one first; the last of them has changed."""

    def close(self) -> None:
        """Leave what was drawn last, and restore the terminal."""


def display_on(file: TextIO, refresh_every: float, between_lines: float, rich: bool) -> Display:
    """Return what suits a file: rich or tqdm on a terminal, else lines.

    Args:
        file: to write to.
        refresh_every: seconds between drawings on a terminal.
        between_lines: seconds between lines elsewhere.
        rich: it is installed, and wanted.
    """
    if not can_redraw(file):
        return LineDisplay(file, between_lines)
    return (RichDisplay if rich else TqdmDisplay)(file, refresh_every)


def can_redraw(file: TextIO) -> bool:
    """Return whether a file is a terminal that can move its cursor, and show colors."""
    return file.isatty() and os.environ.get("TERM") not in _NO_CURSOR


class LineDisplay:
    """Print plain lines where there is no terminal.

    Args:
        file: to print to.
        seconds: between two prints.
    """

    redraws = False
    bar: tuple[str, str] | None = None

    def __init__(self, file: TextIO, seconds: float) -> None:
        self.seconds = seconds
        self._file = file

    def width(self) -> int:
        """Return ``COLUMNS``, 100 by default."""
        return columns_variable() or _LINE_WIDTH

    def draw(self, passes: Sequence[Sequence[Line]]) -> None:
        """Print the pass that has changed."""
        print("\n".join(map(_plain, passes[-1])), file=self._file, flush=True)

    def close(self) -> None:
        """Do nothing: lines need no end."""


class TqdmDisplay:
    """Draw lines with tqdm, one of its bars each, so that ``tqdm.write`` prints above them.

    Args:
        file: a terminal.
        seconds: between two drawings.
    """

    redraws = True

    def __init__(self, file: TextIO, seconds: float) -> None:
        self.seconds = seconds
        self._file = file
        self.bar: tuple[str, str] | None = ("█", " ") if _encodes(file, "█") else ("#", " ")
        self._rows: list[Any] = []

    def width(self) -> int:
        """Return the terminal's width."""
        return terminal_width(self._file)

    def draw(self, passes: Sequence[Sequence[Line]]) -> None:
        """Draw the lines, and clear those that are no longer there."""
        from tqdm import tqdm

        texts, width = [_plain(line) for lines in passes for line in lines], self.width()
        while len(self._rows) > len(texts):
            self._rows[-1].leave = False
            self._rows.pop().close()
        for row, text in zip(self._rows, texts, strict=False):
            row.ncols = width
            row.set_description_str(text)
        for text in texts[len(self._rows) :]:
            layout = "{desc}{bar:0}"  # tqdm cuts lines only if they have its bar, here of no column
            row = tqdm(
                desc=text, bar_format=layout, file=self._file, leave=True, ncols=width, nrows=_ROWS
            )
            self._rows.append(row)

    def close(self) -> None:
        """End the lines, from the first to the last."""
        for row in self._rows:
            row.close()
        self._rows = []


class RichDisplay:
    """Draw lines with rich, in color; what is printed meanwhile appears above them.

    Args:
        file: a terminal.
        seconds: between two drawings.
    """

    redraws = True

    def __init__(self, file: TextIO, seconds: float) -> None:
        from rich.console import Console
        from rich.live import Live

        self.seconds = seconds
        self._file = file
        self._console: Console = Console(file=file, force_terminal=True, width=self.width())
        utf8 = _encodes(file, "━")
        colored = self._console.color_system and not self._console.no_color
        open_part = "━" if colored else " "  # told apart by its color
        self.bar: tuple[str, str] | None = ("━", open_part) if utf8 else ("#", " ")
        # Without a thread: it is drawn as batches are counted.
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="visible")
        self._live.start()

    def width(self) -> int:
        """Return the terminal's width."""
        return terminal_width(self._file)

    def draw(self, passes: Sequence[Sequence[Line]]) -> None:
        """Draw the lines."""
        self._console.width = self.width()
        self._live.update(_rich_group(passes), refresh=True)

    def close(self) -> None:
        """Leave the lines on the screen, and what is printed to its own streams."""
        self._live.stop()


def _rich_group(passes: Sequence[Sequence[Line]]) -> Group:
    from rich.console import Group
    from rich.text import Text

    every = (line for lines in passes for line in lines)
    return Group(*(Text.assemble(*line, overflow="crop", no_wrap=True) for line in every))


def _plain(line: Line) -> str:
    return "".join(text for text, _ in line)


def _encodes(file: TextIO, character: str) -> bool:
    try:
        character.encode(file.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
