"""Rewriting import statements: in place where all moves, else one statement becomes two."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from accel_callbacks.migrate.imports import Binding, below
from accel_callbacks.migrate.names import OLD, TOP, UTILS, home_of, is_module
from accel_callbacks.migrate.source import Edit, Source

_FROM = re.compile(r"from\s+([\w.]+)\s+import\b")


def import_edits(
    source: Source,
    statement: ast.Import | ast.ImportFrom,
    aliases: list[ast.alias],
    bindings: Mapping[str, Binding],
    added: set[str],
) -> Iterator[Edit]:
    """Yield what changes in one statement; `added` holds what was added at top level so far."""
    if isinstance(statement, ast.Import):
        edits = _plain(source, statement, aliases, bindings)
    else:
        edits = _from(source, statement, bindings)
    for edit in edits:
        key = edit.text.strip()
        top = edit.start == edit.end and isinstance(source.parents[statement], ast.Module)
        if not (top and key.startswith("import ") and key in added):
            yield edit
        if top:
            added.add(key)


def _plain(
    source: Source,
    statement: ast.Import,
    aliases: list[ast.alias],
    bindings: Mapping[str, Binding],
) -> Iterator[Edit]:
    """Change ``import accelerate`` and ``import accelerate.utils as u``."""
    added = []
    for alias in aliases:
        binding = bindings[alias.asname or OLD]
        below_utils = (below(alias.name) or ("",))[0] == "utils"
        elsewhere = binding.has_utils and alias.asname is None
        home = UTILS if below_utils or (binding.home == UTILS and not elsewhere) else TOP
        if binding.mode == "beside":
            added.append(f"import {home}")
        elif binding.mode != "leave":
            local = f" as {binding.local}" if binding.mode == "alias" else ""
            yield Edit(*source.span(alias), f"{home}{local}")
    yield from _add(source, statement, list(dict.fromkeys(added)))


def _from(
    source: Source, statement: ast.ImportFrom, bindings: Mapping[str, Binding]
) -> Iterator[Edit]:
    """Change ``from accelerate.utils import a, b``; what is not here stays in one of its own."""
    path = below(statement.module or "") or ()
    places = {alias: _place(alias, path, bindings) for alias in statement.names}
    needs_utils = path[:1] == ("utils",) or any(home == UTILS for home, _ in places.values())
    base = UTILS if needs_utils else TOP
    groups: dict[str, list[tuple[ast.alias, str]]] = {}
    extra = []
    for alias, (home, text) in places.items():
        if home == "beside":
            extra.append(f"import {bindings[alias.asname or alias.name].home}")
        # what is at the top is in utils too
        place = {"": "", "beside": "", "module": TOP}.get(home, base)
        groups.setdefault(place, []).append((alias, text))
    moved = {place: group for place, group in groups.items() if place}
    if not moved:
        yield from _add(source, statement, extra)
        return
    primary = max(moved, key=lambda place: len(moved[place]))
    stay = f"from {statement.module} import "
    for place, group in groups.items():
        if place != primary:
            start = f"from {place} import " if place else stay
            extra.append(start + ", ".join(text for _, text in group))
    kept = [alias for alias, _ in moved[primary]]
    head = _FROM.match(source.text, source.span(statement)[0])
    if head is None:  # such as dots with spaces around them
        names = ", ".join(text for _, text in moved[primary])
        yield Edit(*source.span(statement), f"from {primary} import {names}")
    else:
        yield Edit(*head.span(1), primary)
        for alias, text in moved[primary]:
            if text != _as_written(alias):
                yield Edit(*source.span(alias), text)
        yield from _without(source, statement, kept)
    yield from _add(source, statement, extra)


def _as_written(alias: ast.alias) -> str:
    """Return an alias as text."""
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _place(
    alias: ast.alias, path: tuple[str, ...], bindings: Mapping[str, Binding]
) -> tuple[str, str]:
    """Say from where an alias is to be imported ("" to leave it), and how it is written."""
    local = alias.asname or alias.name
    full = (*path, alias.name)
    if alias.name == "*":
        return "", "*"
    if is_module(full):
        mode = bindings[local].mode
        if mode in ("beside", "leave"):
            return mode if mode == "beside" else "", _as_written(alias)
        return "module", "utils" if local == "utils" else f"utils as {local}"
    return home_of(full) or "", _as_written(alias)


def _without(source: Source, statement: ast.ImportFrom, kept: list[ast.alias]) -> Iterator[Edit]:
    """Take the names that do not move out of a list, with their commas."""
    spans = [source.span(alias) for alias in statement.names]
    text, end = source.text, source.span(statement)[1]
    last_kept = max(n for n, alias in enumerate(statement.names) if alias in kept)
    for number, alias in enumerate(statement.names):
        if alias in kept:
            continue
        start, stop = spans[number]
        if number < last_kept:
            stop = spans[number + 1][0]
        elif text[end - 1] == ")":
            comma = re.compile(r"\s*,").match(text, stop)
            stop = comma.end() if comma else stop
            begin, line_end = source.line_of(start)
            after = text[stop:line_end].strip()
            if not text[begin:start].strip() and (not after or after.startswith("#")):
                start, stop = begin - len(source.newline), line_end
            elif text[start - 1] == " ":
                start -= 1
        else:
            start = spans[number - 1][1]
        yield Edit(start, stop, "")


def _add(source: Source, statement: ast.stmt, lines: list[str]) -> Iterator[Edit]:
    """Put statements after another one, on lines of their own where it has one."""
    if not lines:
        return
    start, end = source.span(statement)
    begin, line_end = source.line_of(start)
    after = source.text[end : source.line_of(end)[1]].strip()
    indent = source.text[begin:start]
    if not indent.strip() and (not after or after.startswith("#")):
        text = "".join(f"{source.newline}{indent}{line}" for line in lines)
        line_end = source.line_of(end)[1]
        yield Edit(line_end, line_end, text)
    else:
        yield Edit(end, end, "".join(f"; {line}" for line in lines))
