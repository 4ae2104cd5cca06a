"""Find imports of accelerate and the uses of its modules, and rewrite both."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from accel_callbacks.compat.migrate.names import (
    OLD,
    TOP,
    UTILS,
    advice_for,
    finding_for,
    home_of,
    is_module,
)
from accel_callbacks.compat.migrate.source import Edit, Finding, Source

Mode = Literal["rename", "alias", "beside", "leave"]
_NAMED = (
    *(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ExceptHandler, ast.MatchAs, ast.MatchStar),
)
_DOTTED = re.compile(r"accelerate(\.[A-Za-z_]\w*)+")
_FROM = re.compile(r"from\s+([\w.]+)\s+import\b")


@dataclass(frozen=True)
class Use:
    """One use of a local name that is bound to a module of accelerate.

    Attributes:
        node: the expression to replace, an attribute that is a name of accelerate.
        root: the local name at its start.
        path: its path below accelerate; empty for the module itself.
        home: the package that has the name here; None if none has or it cannot be replaced.
    """

    node: ast.expr
    root: ast.Name
    path: tuple[str, ...]
    home: str | None


@dataclass
class Binding:
    """A local name that is bound to accelerate or a module of it.

    Attributes:
        local: the local name.
        renamed: the script chose it (``import accelerate as a``).
        uses: its uses.
        shared: the script binds the name to something else too.
        has_utils: the script also has a plain import of accelerate.utils.
        mode: "rename": replace by our package; "alias": import our package under this name;
            "beside": import both, as some names are missing here; "leave": change nothing.
    """

    local: str
    renamed: bool
    uses: list[Use] = field(default_factory=list)
    shared: bool = False
    has_utils: bool = False
    mode: Mode = "leave"

    @property
    def home(self) -> str:
        """Package that has all of the used names."""
        return UTILS if any(use.home == UTILS for use in self.uses) else TOP

    def decide(self, free: bool) -> None:
        """Choose the mode; `free`: the script has no other use for the name of our package."""
        named = [use for use in self.uses if use.path]
        whole = len(named) < len(self.uses)
        if all(use.home for use in named):
            plain = not (self.renamed or self.shared or whole)
            self.mode = "rename" if plain and free else "alias"
        elif any(use.home for use in named) and free and not self.shared:
            self.mode = "beside"


def imports_of(source: Source) -> Iterator[tuple[ast.Import | ast.ImportFrom, list[ast.alias]]]:
    """Yield the imports of accelerate, with the aliases that import from it."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if below(alias.name) is not None]
            if aliases:
                yield node, aliases
        elif isinstance(node, ast.ImportFrom):
            relative = node.level > 0  # to the script's own package
            if not relative and below(node.module or "") is not None:
                yield node, node.names


def below(dotted: str) -> tuple[str, ...] | None:
    """Return the path of a module below accelerate; None if it belongs to another package."""
    first, *rest = dotted.split(".")
    return tuple(rest) if first == OLD else None


def bindings_of(source: Source) -> dict[str, Binding]:
    """Find the names bound to modules of accelerate and their uses, and choose the modes."""
    paths: dict[str, set[tuple[str, ...]]] = {}
    renamed: dict[str, bool] = {}
    ours: set[ast.alias] = set()
    for statement, aliases in imports_of(source):
        for alias in aliases:
            bound = _module_bound(statement, alias)
            if bound is not None:
                local, path, chosen = bound
                paths.setdefault(local, set()).add(path)
                renamed[local] = renamed.get(local, False) or chosen
                ours.add(alias)
    bindings = {local: Binding(local, renamed[local]) for local in paths}
    for alias in ours:
        if alias.asname is None and alias.name.startswith(f"{OLD}.utils"):
            bindings[OLD].has_utils = True
    others = _bound_otherwise(source, ours)
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id in bindings and isinstance(node.ctx, ast.Load):
            (path, *more) = sorted(paths[node.id])
            use = _use(source, node, path)
            bindings[node.id].uses.append(use if not more else Use(node, node, (OLD,), None))
    _add_texts(source, bindings)
    for local, binding in bindings.items():
        binding.shared = local in others
        binding.decide(free=TOP not in others)
    return bindings


def _module_bound(
    statement: ast.Import | ast.ImportFrom, alias: ast.alias
) -> tuple[str, tuple[str, ...], bool] | None:
    """Return the name that an alias binds to a module, its path, and whether it was renamed."""
    if isinstance(statement, ast.Import):
        path = below(alias.name) or ()
        return (OLD, (), False) if alias.asname is None else (alias.asname, path, True)
    path = (*(below(statement.module or "") or ()), alias.name)
    return (alias.asname or alias.name, path, True) if is_module(path) else None


def _use(source: Source, root: ast.Name, path: tuple[str, ...]) -> Use:
    """Follow attributes from a local name to the name of accelerate."""
    node: ast.expr = root
    editable = True
    while is_module(path):
        parent = source.parents.get(node)
        if not (isinstance(parent, ast.Attribute) and parent.value is node):
            return Use(node, root, () if node is root else (*path, "*"), None)
        node, path = parent, (*path, parent.attr)
        editable = editable and isinstance(parent.ctx, ast.Load)
    if any(isinstance(ancestor, ast.JoinedStr) for ancestor in source.ancestors(node)):
        # Older versions of Python report wrong positions in some f-strings.
        editable = editable and source.has_true_position(node)
    return Use(node, root, path, home_of(path) if editable else None)


def _bound_otherwise(source: Source, ours: set[ast.alias]) -> set[str]:
    """Collect the names that are bound by anything but an import of accelerate, in any scope."""
    names: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias) and node not in ours:
            local = node.asname or node.name.partition(".")[0]
            # Not our own package: the script may be partly migrated.
            names |= {local} - ({TOP} if node.name.partition(".")[0] == TOP else set())
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, _NAMED) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
    return names


def _add_texts(source: Source, bindings: dict[str, Binding]) -> None:
    """Add annotations in quotes, as uses that cannot be replaced."""
    if OLD not in bindings:
        return
    for node in source.nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.Constant) and isinstance(text, str) and _DOTTED.fullmatch(text):
            parents = source.ancestors(node)
            if any(isinstance(parent, ast.arg | ast.AnnAssign) for parent in parents):
                root = ast.Name(OLD, ast.Load(), lineno=node.lineno, col_offset=0)
                bindings[OLD].uses.append(Use(node, root, tuple(text.split(".")[1:]), None))


def import_edits(
    source: Source,
    statement: ast.Import | ast.ImportFrom,
    aliases: list[ast.alias],
    bindings: Mapping[str, Binding],
    added: set[str],
) -> Iterator[Edit]:
    """Yield the edits of one import; `added`: imports added at the top level so far."""
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
    """Yield the edits of ``import accelerate`` or ``import accelerate.utils as u``."""
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
    """Yield the edits of ``from accelerate.utils import a, b``; missing names stay, separately."""
    path = below(statement.module or "") or ()
    places = {alias: _place(alias, path, bindings) for alias in statement.names}
    needs_utils = path[:1] == ("utils",) or any(home == UTILS for home, _ in places.values())
    base = UTILS if needs_utils else TOP
    groups: dict[str, list[tuple[ast.alias, str]]] = {}
    extra = []
    for alias, (home, text) in places.items():
        if home == "beside":
            extra.append(f"import {bindings[alias.asname or alias.name].home}")
        # The names of the top package are in utils too.
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
    if head is None:  # such as spaces around dots
        names = ", ".join(text for _, text in moved[primary])
        yield Edit(*source.span(statement), f"from {primary} import {names}")
    else:
        yield Edit(*head.span(1), primary)
        for alias, text in moved[primary]:
            if text != _alias_text(alias):
                yield Edit(*source.span(alias), text)
        yield from _without(source, statement, kept)
    yield from _add(source, statement, extra)


def _alias_text(alias: ast.alias) -> str:
    """Return the source of an alias."""
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _place(
    alias: ast.alias, path: tuple[str, ...], bindings: Mapping[str, Binding]
) -> tuple[str, str]:
    """Return the place to import an alias from ("" to leave it), and its text."""
    local = alias.asname or alias.name
    full = (*path, alias.name)
    if alias.name == "*":
        return "", "*"
    if is_module(full):
        mode = bindings[local].mode
        if mode in ("beside", "leave"):
            return mode if mode == "beside" else "", _alias_text(alias)
        return "module", "utils" if local == "utils" else f"utils as {local}"
    return home_of(full) or "", _alias_text(alias)


def _without(source: Source, statement: ast.ImportFrom, kept: list[ast.alias]) -> Iterator[Edit]:
    """Yield edits that remove the names that do not move, with their commas."""
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
    """Yield an edit that adds statements after another, on new lines unless it shares its line."""
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


def use_edits(source: Source, binding: Binding) -> Iterator[Edit]:
    """Yield the edits of the uses of a module of accelerate."""
    if binding.mode == "leave":
        return
    for use in binding.uses:
        if use.home is None:
            continue
        name = use.path[-1]
        start = binding.local if binding.mode == "alias" else use.home
        edit = Edit(*source.span(use.node), f"{start}.{name}")
        if source.text[edit.start : edit.end] != edit.text:
            yield edit


def use_findings(binding: Binding) -> Iterator[Finding]:
    """Yield the uses that remain unchanged, with the reason."""
    for use in binding.uses:
        if not use.path or (use.home and binding.mode != "leave"):
            continue
        name = ".".join(("accelerate", *use.path)).removesuffix(".*")
        yield replace(finding_for(use.root.lineno, use.path, _why(use, binding)), name=name)


def _why(use: Use, binding: Binding) -> str:
    """Return the reason why a use was not replaced."""
    if use.home:
        return f"{binding.local!r} names something else in this file too: change it by hand"
    if use.path[-1] == "*":
        return "the module itself is passed on: change it by hand"
    if home_of(use.path):
        return "in quotes, in an f-string or assigned to: change it by hand"
    return advice_for(use.path[-1])
