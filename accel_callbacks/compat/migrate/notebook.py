"""Migrate the cells of a notebook; read and replace files."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

from accel_callbacks.compat.migrate.script import analyze, migrate_script
from accel_callbacks.compat.migrate.source import (
    Edit,
    Finding,
    Kind,
    Migration,
    UnreadableError,
    apply_edits,
    parsed,
)
from accel_callbacks.local_files import remove, sync_file
from accel_callbacks.local_files import replace as replace_file

__all__ = ["MovedFile", "migrate_notebook", "read_and_move"]

_COMMAND = re.compile(
    r"\baccelerate(?=[ -](launch|config|env|test|estimate-memory|merge-weights)\b)"
)
_NAMED = re.compile(r"\baccelerate\b")
_INSTALL = re.compile(r"\bpip3? install\b.*\baccelerate\b")
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")
_MAGIC = re.compile(r"^(\s*)([!%?]|[\w., ]+=\s*[!%](?=[\w(]))|\?\s*$")
MAX_BYTES = 64 << 20


@dataclass
class _Cell:
    """A code cell: its text, its Python with the rest masked, its start in the joined text."""

    number: int
    text: str
    masked: str
    start: int = 0


def migrate_notebook(text: str) -> Migration:
    """Migrate the code cells of a Jupyter notebook; outputs and everything else stay.

    Shell and IPython lines stay too, except for the command ``accelerate``.

    Args:
        text: JSON of the file (nbformat 4).

    Raises:
        UnreadableError: the text is not a notebook of nbformat 4.

    Example:
        >>> import json
        >>> from accel_callbacks.compat.migrate import migrate_notebook
        >>> cell = {"cell_type": "code", "source": ["!ls\\n", "import accelerate"]}
        >>> moved = migrate_notebook(json.dumps({"nbformat": 4, "cells": [cell]}))
        >>> json.loads(moved.after)["cells"][0]["source"]
        ['!ls\\n', 'import accel_callbacks']
    """
    book = _read(text)
    cells: list[_Cell] = []
    for number, cell in enumerate(book["cells"], 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            cells.append(_cell(number, _source_of(cell, number)))
    start = 0
    for cell in cells:
        cell.start, start = start, start + len(cell.masked) + 1
    edits, script_findings = analyze("\n".join(cell.masked for cell in cells))
    for cell in cells:
        inner = [edit for edit in edits if cell.start <= edit.start <= cell.start + len(cell.text)]
        moved = [Edit(edit.start - cell.start, edit.end - cell.start, edit.text) for edit in inner]
        after = apply_edits(cell.text, [*moved, *_command_edits(cell)])
        if after != cell.text:
            _put(book["cells"][cell.number - 1], after)
    findings = [*_unread(cells), *(_placed(finding, cells) for finding in script_findings)]
    findings.sort(key=lambda finding: (finding.cell, finding))
    return Migration(text, _written(book, text), findings)


def _read(text: str) -> dict[str, Any]:
    """Parse the JSON of a notebook."""
    try:
        book = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"is not a notebook: {error or 'nested too deeply'}") from error
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        raise UnreadableError("is not a notebook of nbformat 4: it has no list of cells")
    return book


def _source_of(cell: dict[str, Any], number: int) -> str:
    """Return the text of a cell, which is stored as a string or as a list of lines."""
    source = cell.get("source", "")
    lines = source if isinstance(source, list) else [source]
    if not all(isinstance(line, str) for line in lines):
        raise UnreadableError(f"is not a notebook: cell {number} has no text")
    return "".join(lines)


def _put(cell: dict[str, Any], text: str) -> None:
    """Set the text of a cell in the form in which it was stored."""
    as_list = isinstance(cell.get("source"), list)
    cell["source"] = re.findall(r".*?\n|.+$", text, re.S) if as_list else text


def _cell(number: int, text: str) -> _Cell:
    """Make a cell, masking what is not Python by text of the same length."""
    lines, hidden = text.split("\n"), False
    if lines[0].startswith("%%") and not lines[0].startswith(_PYTHON_MAGICS):
        return _Cell(number, text, "\n".join("#" * len(line) for line in lines))
    masked = []
    for line in lines:
        if hidden:  # continued from the previous line
            masked.append("#" * len(line))
        else:
            hidden = _MAGIC.search(line) is not None
            masked.append(_hidden(line) if hidden else line)
        hidden = hidden and line.endswith("\\")
    whole = "\n".join(masked)
    try:
        parsed(text)
        return _Cell(number, text, text)  # plain Python, such as a line that starts with %
    except UnreadableError:
        pass
    try:
        parsed(whole)
    except UnreadableError:
        whole = "\n".join("#" * len(line) for line in lines)
    return _Cell(number, text, whole)


def _hidden(line: str) -> str:
    """Replace a line by a statement without effect, of the same length and indentation."""
    indent = len(line) - len(line.lstrip())
    return line[:indent] + "0" + "#" * (len(line) - indent - 1) if line.strip() else line


def _unread(cells: list[_Cell]) -> Iterator[Finding]:
    """Yield findings for masked lines that name accelerate."""
    for cell in cells:
        lines = zip(cell.text.split("\n"), cell.masked.split("\n"), strict=True)
        for number, (text, masked) in enumerate(lines, 1):
            if text == masked or text.lstrip().startswith("#"):
                continue
            if _INSTALL.search(text):
                advice = "pip install accel-callbacks"
                yield Finding(number, "pip install accelerate", advice, "note", cell.number)
            elif _NAMED.search(text) and not _COMMAND.search(text):
                kind: Kind = "note" if text.lstrip().startswith("!") else "left"
                why = "this is no plain Python: change it by hand"
                yield Finding(number, "accelerate", why, kind, cell.number)


def _command_edits(cell: _Cell) -> Iterator[Edit]:
    """Yield the edits of shell lines."""
    position = 0
    shell = cell.text.startswith(("%%bash", "%%sh", "%%script", "%%!"))
    for text, masked in zip(cell.text.split("\n"), cell.masked.split("\n"), strict=True):
        if text != masked and (shell or "!" in text.partition("accelerate")[0] or "%" in text):
            for match in _COMMAND.finditer(text):
                yield Edit(position + match.start(), position + match.end(), "accel")
        position += len(text) + 1


def _placed(finding: Finding, cells: list[_Cell]) -> Finding:
    """Convert the line of a finding in the joined text to the cell and its line."""
    first = 1
    for cell in cells:
        height = cell.masked.count("\n") + 1
        if finding.line < first + height:
            return replace(finding, line=finding.line - first + 1, cell=cell.number)
        first += height
    return finding


def _written(book: dict[str, Any], before: str) -> str:
    """Serialize the notebook in the JSON style of the original, as far as it is recognized."""
    original = json.loads(before)
    if original == book:
        return before
    end = "\n" if before.endswith("\n") else ""
    for indent in (1, 2, 4, None):
        for ascii_only in (False, True):
            if json.dumps(original, indent=indent, ensure_ascii=ascii_only) + end == before:
                return json.dumps(book, indent=indent, ensure_ascii=ascii_only) + end
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class MovedFile:
    """A file with its migration.

    Attributes:
        path: path of the file.
        data: its original bytes.
        encoding: of its text.
        migration: the changes.
    """

    path: str
    data: bytes
    encoding: str
    migration: Migration

    def write(self) -> None:
        """Replace the file (the target of a link) atomically, keeping its permissions.

        Raises:
            OSError: the file or its folder cannot be written.
            ValueError: the file has changed since it was read.
        """
        target = os.path.realpath(self.path)
        new = self.migration.after.encode(self.encoding)
        if not os.access(target, os.W_OK):
            raise PermissionError(13, "is read-only", self.path)
        descriptor, temporary = tempfile.mkstemp(
            prefix=".accel-migrate-", dir=os.path.dirname(target)
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(new)
                file.flush()
                sync_file(file.fileno())
            status = os.stat(target)
            os.chmod(temporary, status.st_mode & 0o7777)
            if sys.platform != "win32":
                with suppress(PermissionError):
                    os.chown(temporary, status.st_uid, status.st_gid)
            with open(target, "rb") as now:
                if now.read() != self.data:
                    raise ValueError("has changed since it was read: run this again")
            replace_file(temporary, target)
        except BaseException:
            with suppress(OSError):
                remove(temporary)
            raise


def read_and_move(path: str) -> MovedFile:
    """Read and migrate a script or a notebook; nothing is written.

    Raises:
        OSError: the file cannot be read.
        UnreadableError: the file is neither a script nor a notebook.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(2, "there is no such file", path)
    if os.path.getsize(path) > MAX_BYTES:
        raise UnreadableError(f"is larger than {MAX_BYTES >> 20} MiB")
    with open(path, "rb") as file:
        data = file.read()
    notebook = path.endswith(".ipynb")
    encoding = "utf-8" if notebook else _encoding(data)
    try:
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise UnreadableError(f"is no text in {encoding}: {error}") from error
    move: Callable[[str], Migration] = migrate_notebook if notebook else migrate_script
    return MovedFile(path, data, encoding, move(text))


def _encoding(data: bytes) -> str:
    """Detect the encoding of a script by its byte order mark or first lines."""
    try:
        return tokenize.detect_encoding(BytesIO(data).readline)[0]
    except SyntaxError as error:
        raise UnreadableError(str(error)) from error
