"""Parse the source of a script, and edit it by position."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Finding", "Migration", "UnreadableError"]

Kind = Literal["left", "differs", "note"]
_LINE_END = re.compile(r"\r\n|\r|\n")


class UnreadableError(ValueError):
    """Raised for a script that is not valid Python, or a file that is not a notebook.

    Example:
        >>> from accel_callbacks.compat.migrate import UnreadableError, migrate_script
        >>> try:
        ...     migrate_script("import (")
        ... except UnreadableError as error:
        ...     print("line 1" in str(error))
        True
    """


@dataclass(frozen=True, order=True)
class Finding:
    """Code that needs attention.

    Attributes:
        line: line number, from 1; in a notebook within the cell.
        name: the code, such as a name or a call.
        text: the difference, and what to do.
        kind: "left": does not run here and was not changed; "differs": runs, and behaves
            differently; "note": worth knowing.
        cell: number of the notebook's cell, from 1; 0 in a script.

    Example:
        >>> from accel_callbacks.compat.migrate import migrate_script
        >>> [finding] = migrate_script("from accelerate import prepare_pippy\\n").findings
        >>> finding.line, finding.name, finding.kind
        (1, 'prepare_pippy', 'left')
    """

    line: int
    name: str
    text: str
    kind: Kind = "differs"
    cell: int = 0

    @property
    def place(self) -> str:
        """Cell and line, as text."""
        return f"cell {self.cell} line {self.line}" if self.cell else f"line {self.line}"


@dataclass(frozen=True)
class Migration:
    """A file before and after migration.

    Attributes:
        before: the original text.
        after: the migrated text, which may be the same.
        findings: code that needs attention, in the order of the file.

    Example:
        >>> from accel_callbacks.compat.migrate import migrate_script
        >>> migrate_script("print(1)\\n").changed
        False
    """

    before: str
    after: str
    findings: Sequence[Finding] = ()

    @property
    def changed(self) -> bool:
        """True if the text has changed."""
        return self.before != self.after

    @property
    def left(self) -> list[Finding]:
        """Findings that do not run here."""
        return [finding for finding in self.findings if finding.kind == "left"]


class Edit(NamedTuple):
    """Replacement of the characters from `start` to `end`."""

    start: int
    end: int
    text: str


class Source:
    """Parsed source of a script.

    Raises:
        UnreadableError: the text is not valid Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = parsed(text)
        ends = [match.end() for match in _LINE_END.finditer(text)]
        self._starts = [0, *ends]
        self.newline = next(iter(_LINE_END.findall(text)), "\n")
        self.nodes: list[ast.AST] = [self.tree]
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in self.nodes:  # the list grows during the loop
            children = list(ast.iter_child_nodes(node))
            self.parents.update(dict.fromkeys(children, node))
            self.nodes += children

    def _offset(self, line: int, column: int) -> int:
        """Convert a line and a column, which the parser counts in bytes, to an index."""
        start = self._starts[line - 1]
        stop = self._starts[line] if line < len(self._starts) else len(self.text)
        return start + len(self.text[start:stop].encode()[:column].decode(errors="ignore"))

    def span(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> tuple[int, int]:
        """Return the begin and end index of a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        return start, self._offset(node.end_lineno, node.end_col_offset)

    def has_true_position(self, node: ast.expr) -> bool:
        """Return whether a dotted name is at the position that the parser reports."""
        return self.text[slice(*self.span(node))] == ast.unparse(node)

    def line_of(self, offset: int) -> tuple[int, int]:
        """Return the begin and end of the line around an index, without the line ending."""
        start = max(begin for begin in self._starts if begin <= offset)
        match = _LINE_END.search(self.text, offset)
        return start, match.start() if match else len(self.text)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the ancestors of a node, the nearest first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent


def parsed(text: str) -> ast.Module:
    """Parse a script, or the joined cells of a notebook, which may await at the top level.

    Raises:
        UnreadableError: the text is not valid Python.
    """
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in the script
            tree = compile(text, "<script>", "exec", flags=flags, dont_inherit=True)
    except SyntaxError as error:
        raise UnreadableError(f"line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(str(error) or "nested too deeply") from error
    assert isinstance(tree, ast.Module)
    return tree


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits to a text; insertions at the same index stay in the given order."""
    pieces, done = [], 0
    for edit in sorted(edits, key=lambda edit: edit[:2]):
        if edit.start < done:
            raise AssertionError(f"edits overlap at {edit.start}")
        pieces += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*pieces, text[done:]])
