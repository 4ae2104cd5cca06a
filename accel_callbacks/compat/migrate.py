r"""Move a script from Accelerate to this package: its imports are rewritten, the rest is reported.

Example:
    >>> from accel_callbacks.compat.migrate import migrate_script
    >>> print(migrate_script("from accelerate import Accelerator  # one\n").after, end="")
    from accel_callbacks import Accelerator  # one
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from accel_callbacks.compat.check import (
    ALONE,
    Import,
    Lookup,
    NameUse,
    UnreadableError,
    imports_of,
    is_module,
    lone_calls,
    lookups_of,
    parse,
    status_of,
)
from accel_callbacks.compat.names import home_of
from checkpoint_io.local_files import remove, replace, sync_file

__all__ = ["Finding", "Migration", "ScriptFile", "UnreadableError", "migrate_script", "read_script"]

Kind = Literal["left", "differs", "note"]
_OLD, _TOP, _UTILS = "accelerate", "accel_callbacks", "accel_callbacks.utils"
_LINE_END = re.compile(rb"\r\n|\r|\n")
_FROM = re.compile(rb"from\s+[\w.\s\\]+?\s+import\b")

_FOR_TESTS = "left as it is: only tests import it, and accelerate has to be installed for them"
_VERSION = "the version of Accelerate is irrelevant here: remove the check"
_BY_NAME = "import it by name, with `from ... import`, and migrate again"
_ALIAS_ONLY = (
    "here under Accelerate's name alone: the import gets it after accel_callbacks.compat.install()"
)
_STAYS = "left as it is, with all that is looked up in it, because some of that cannot move"
_STRICTER = (
    "refuses arguments that Accelerate takes, by an error that says what to write; see "
    "docs/reference/accelerate-differences.md"
)


@dataclass(frozen=True, order=True)
class Finding:
    r"""Code that needs attention.

    Attributes:
        line: line number, from 1.
        name: the name or import.
        text: the difference, and what to do.
        kind: "left": does not run here and was not changed; "differs": runs, and behaves
            differently; "note": worth knowing.

    Example:
        >>> from accel_callbacks.compat.migrate import migrate_script
        >>> [finding] = migrate_script("from accelerate import prepare_pippy\n").findings
        >>> finding.line, finding.name, finding.kind
        (1, 'prepare_pippy', 'left')
    """

    line: int
    name: str
    text: str
    kind: Kind = "left"


@dataclass(frozen=True)
class Migration:
    r"""A script before and after migration.

    Attributes:
        before: the original text.
        after: the migrated text, which may be the same.
        findings: code that needs attention, in the order of the file.

    Example:
        >>> from accel_callbacks.compat.migrate import migrate_script
        >>> migrate_script("print(1)\n").changed
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


def migrate_script(text: str) -> Migration:
    r"""Migrate a Python script from accelerate to accel_callbacks, without running it.

    Names that this package has are imported from it. Imports of others stay, and are findings.
    The result parses, and migrating it again changes nothing.

    Args:
        text: source of the script.

    Raises:
        UnreadableError: the text is not valid Python of this version.

    Example:
        >>> from accel_callbacks.compat.migrate import migrate_script
        >>> script = "import accelerate\naccelerate.gather(1)\n"
        >>> print(migrate_script(script).after, end="")
        import accel_callbacks as accelerate
        accelerate.gather(1)
    """
    tree = parse(text)
    imports = list(imports_of(tree))
    stuck, findings = _find_stuck_modules(tree, imports)
    findings |= (
        {Finding(use.line, use.name, ALONE) for use in lone_calls(text)} if imports else set()
    )
    statements = [list(names) for _, names in groupby(imports, key=lambda one: one.statement)]
    statements.sort(key=lambda names: (names[0].statement.lineno, names[0].statement.col_offset))
    data = text.encode()  # in which the parser counts columns
    lines = [0, *(match.end() for match in _LINE_END.finditer(data))]
    for names in reversed(statements):  # so that the positions of those before stay
        moves = [_move(one, stuck, text) for one in names]
        findings |= {move.finding for move in moves if move.finding}
        data = _rewrite(data, lines, moves)
    try:
        parse(data.decode())
    except UnreadableError as error:
        raise UnreadableError(f"cannot be rewritten without breaking it ({error})") from error
    return Migration(text, data.decode(), sorted(findings))


def _find_stuck_modules(
    tree: ast.Module, imports: Sequence[Import]
) -> tuple[dict[str, Kind], set[Finding]]:
    """Return the local names of modules that cannot move, and the findings in all modules."""
    stuck: dict[str, Kind] = {}
    findings: list[tuple[str, Finding]] = []
    lookups = list(lookups_of(tree, imports))
    for one in imports:
        if one.binding is not None and not is_module(one.use.dotted):  # import accelerate.unknown
            lookups.append(Lookup(*one.binding, one.use))
    for local, bound, use in lookups:
        home, finding = _look_up(use, use.dotted)
        # The package itself has utils within. Another module becomes utils, which has all names.
        reached = (bound, f"{_OLD}.utils") if bound == _OLD else (bound,)
        if home and (use.module not in reached or (home == _UTILS and use.module == _OLD)):
            home, finding = "", Finding(use.line, use.dotted, _BY_NAME)
        if finding is not None:
            findings.append((local, finding))
            if not home and stuck.get(local) != "left":
                stuck[local] = finding.kind
    return stuck, {one for local, one in findings if local not in stuck or one.kind != "differs"}


def _look_up(use: NameUse, shown: str) -> tuple[str, Finding | None]:
    """Return the package that has a name; empty, with a finding, if none has."""
    if f"{use.dotted}.".startswith(f"{_OLD}.test_utils."):
        return "", Finding(use.line, shown, _FOR_TESTS, "note")
    if use.name == "__version__":
        return "", Finding(use.line, shown, _VERSION)
    status, reason = status_of(use.module, use.name)
    home = None if reason else home_of(use.name, (_TOP, _UTILS))
    if home is None:
        return "", Finding(use.line, shown, reason or _ALIAS_ONLY)
    return home, Finding(use.line, shown, _STRICTER, "differs") if status == "lenient" else None


class _Move(NamedTuple):
    """An imported name, the package to import it from (empty if it stays), and by which text."""

    one: Import
    home: str
    text: str
    finding: Finding | None = None


def _move(one: Import, stuck: Mapping[str, Kind], script: str) -> _Move:
    """Return how an imported name moves."""
    before = ast.unparse(one.alias)
    if one.binding is None:
        shown = one.use.dotted if one.use.name == "*" else one.use.name
        home, finding = _look_up(one.use, shown)
        return _Move(one, home, before, finding)
    local, module = one.binding
    if local in stuck:
        shown = f"import {one.use.dotted}"
        return _Move(one, "", before, Finding(one.use.line, shown, _STAYS, stuck[local]))
    if isinstance(one.statement, ast.ImportFrom):
        return _Move(one, _TOP, "utils" if local == "utils" else f"utils as {local}")
    if module != _OLD:
        return _Move(one, _UTILS, f"{_UTILS} as {local}")
    # `import accelerate` imports its utils too.
    also = f"{_UTILS}, " if re.search(rf"\b{local}\s*\.\s*utils\b", script) else ""
    return _Move(one, _TOP, f"{also}{_TOP} as {local}")


def _rewrite(data: bytes, lines: Sequence[int], moves: Sequence[_Move]) -> bytes:
    """Return the script with one import statement rewritten.

    Args:
        data: the script.
        lines: where each of its lines begins.
        moves: the names of the statement.
    """
    if not any(move.home for move in moves):
        return data
    statement = moves[0].one.statement
    start, end = _span(lines, statement)
    statements = [text.encode() for text in _statements(statement, moves)]
    if isinstance(statement, ast.ImportFrom) and len(statements) == 1:
        module = statements[0].partition(b" import ")[0]
        moved = _FROM.sub(module + b" import", data[start:end], count=1)
        if all(move.text == ast.unparse(move.one.alias) for move in moves):
            statements = [moved]  # with its comments and its lines
    indent = data[lines[statement.lineno - 1] : start]
    rest = _LINE_END.split(data[end:], maxsplit=1)[0]
    if indent.strip() or rest.strip()[:1] not in (b"", b"#"):  # it shares its line
        return data[:start] + b"; ".join(statements) + data[end:]
    newline = _LINE_END.search(data)
    first, *others = statements
    added = [(newline[0] if newline else b"\n") + indent + other for other in others]
    return b"".join([data[:start], first, rest, *added, data[end + len(rest) :]])


def _statements(statement: ast.Import | ast.ImportFrom, moves: Sequence[_Move]) -> list[str]:
    """Return the statements that take the place of one, those of this package first."""
    if isinstance(statement, ast.Import):
        texts = {move.one.alias: move.text for move in moves}
        names = (texts.get(alias) or ast.unparse(alias) for alias in statement.names)
        return [f"import {', '.join(names)}"]
    groups = _by_place(moves)
    return [
        f"from {place or statement.module} import {', '.join(move.text for move in groups[place])}"
        for place in sorted(
            groups, reverse=True, key=lambda place: (place != "", len(groups[place]))
        )
    ]


def _by_place(moves: Sequence[_Move]) -> dict[str, list[_Move]]:
    """Return the names of a ``from`` statement by the package to import them from."""
    in_utils = any(
        one.use.module.startswith(f"{_OLD}.utils") or home == _UTILS for one, home, *_ in moves
    )
    groups = defaultdict(list)
    for move in moves:
        # utils has the names of the top package too, and is itself in that.
        into_utils = in_utils and move.home and move.one.binding is None
        groups[_UTILS if into_utils else move.home].append(move)
    return groups


def _span(lines: Sequence[int], node: ast.stmt | ast.alias) -> tuple[int, int]:
    """Return where a node begins and ends."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    start = lines[node.lineno - 1] + node.col_offset
    return start, lines[node.end_lineno - 1] + node.end_col_offset


@dataclass(frozen=True)
class ScriptFile:
    """A file with its migration.

    Attributes:
        path: path of the file.
        encoding: of its text.
        migration: the changes.
    """

    path: str
    encoding: str
    migration: Migration

    def write(self) -> None:
        """Replace the file (the target of a link) atomically, keeping its permissions.

        Raises:
            OSError: the file or its folder cannot be written.
        """
        target = os.path.realpath(self.path)
        if not os.access(target, os.W_OK):
            raise PermissionError(13, "is read-only", self.path)
        folder = os.path.dirname(target)
        descriptor, temporary = tempfile.mkstemp(prefix=".accel-migrate-", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.migration.after.encode(self.encoding))
                file.flush()
                sync_file(file.fileno())
            shutil.copymode(target, temporary)
            replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                remove(temporary)
            raise


def read_script(path: str) -> ScriptFile:
    """Read and migrate a script; nothing is written.

    Raises:
        OSError: the file cannot be read.
        UnreadableError: the file is no script.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(2, "there is no such file", path)
    data = Path(path).read_bytes()
    try:
        encoding = tokenize.detect_encoding(BytesIO(data).readline)[0]
        return ScriptFile(path, encoding, migrate_script(data.decode(encoding)))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UnreadableError(str(error)) from error
