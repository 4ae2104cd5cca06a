"""What a terminal shows of the output of a program: enough of one for bars and colors."""

from __future__ import annotations

import re

Span = tuple[str, str]  # text, and the classes of svg.py
_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|[\r\n]|[^\x1b\r\n]")
_COLORS = {1: "bad-text", 2: "good-text", 3: "warm-text", 4: "ours-text", 5: "ours-text"}
_COLORS |= {6: "ours-text", 7: "text", 0: "muted"}


class Screen:
    """Lines of cells, each a character with its classes.

    Args:
        columns: of a line; what does not fit goes on in the next one.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._lines: list[list[Span]] = [[]]
        self._row, self._column = 0, 0
        self._color, self._is_bold = "text", False

    def feed(self, output: str) -> None:
        """Take output of a program."""
        for match in _CONTROL.finditer(output):
            if match[2]:
                self._control(match[1], match[2])
            elif match[0] == "\r":
                self._column = 0
            elif match[0] == "\n":
                self._next_line()
            elif match[0].isprintable():
                self._put(match[0])

    def lines(self) -> list[list[Span]]:
        """Return the lines as runs of characters of the same classes."""
        return [_runs(line) for line in self._lines]

    def text(self) -> str:
        """Return the lines without their classes."""
        return "\n".join("".join(character for character, _ in line) for line in self._lines)

    def _next_line(self) -> None:
        self._row, self._column = self._row + 1, 0
        while len(self._lines) <= self._row:
            self._lines.append([])

    def _put(self, character: str) -> None:
        if self._column >= self._columns:
            self._next_line()
        line = self._lines[self._row]
        line += [(" ", "text")] * (self._column + 1 - len(line))
        line[self._column] = (character, f"{self._color} bold" if self._is_bold else self._color)
        self._column += 1

    def _control(self, words: str, letter: str) -> None:
        numbers = [int(word) for word in words.lstrip("?").split(";") if word]
        count = numbers[0] if numbers else 1
        if letter == "A":
            self._row = max(0, self._row - count)
        elif letter == "G":
            self._column = count - 1
        elif letter == "K":
            del self._lines[self._row][0 if numbers == [2] else self._column :]
        elif letter == "m":
            self._style(numbers or [0])

    def _style(self, numbers: list[int]) -> None:
        if numbers[0] in (38, 48):  # a color of 256 or more
            self._color = "ours-text" if numbers[0] == 38 else self._color
            return
        for number in numbers:
            if number == 0:
                self._color, self._is_bold = "text", False
            elif number == 1:
                self._is_bold = True
            elif number == 2:
                self._color = "muted"
            elif number == 39:
                self._color = "text"
            elif 30 <= number <= 37 or 90 <= number <= 97:
                self._color = _COLORS[number % 10]


def _runs(cells: list[Span]) -> list[Span]:
    """Return neighbors of the same classes as one."""
    runs: list[Span] = []
    for character, classes in cells:
        if runs and runs[-1][1] == classes:
            runs[-1] = (runs[-1][0] + character, classes)
        else:
            runs.append((character, classes))
    if runs:
        runs[-1] = (runs[-1][0].rstrip(), runs[-1][1])
    return [(words, classes) for words, classes in runs if words]
