"""Names that stand for accelerate or one of its modules: who binds them, and how they are used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from accel_callbacks.migrate.names import OLD, TOP, UTILS, home_of, is_module
from accel_callbacks.migrate.source import Source

Mode = Literal["rename", "alias", "beside", "leave"]
_NAMED = (
    *(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ExceptHandler, ast.MatchAs, ast.MatchStar),
)
_DOTTED = re.compile(r"accelerate(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True)
class Use:
    """One use of a bound module.

    Attributes:
        node: what may be replaced: the attribute that is a name of accelerate.
        root: the name that it starts with.
        path: what it means, below accelerate; empty for the module itself.
        home: the package that has the name here, None if none has or it cannot be replaced.
    """

    node: ast.expr
    root: ast.Name
    path: tuple[str, ...]
    home: str | None


@dataclass
class Binding:
    """One local name for accelerate or a module of it.

    Attributes:
        local: the name.
        renamed: whether the script itself chose it (``import accelerate as a``).
        uses: where it is used.
        shared: whether something else in the script has this name too.
        has_utils: whether a plain import of accelerate.utils is there too.
        mode: "rename": write our package instead; "alias": our package under this name; "beside":
            both, as some names are not here; "leave": change nothing.
    """

    local: str
    renamed: bool
    uses: list[Use] = field(default_factory=list)
    shared: bool = False
    has_utils: bool = False
    mode: Mode = "leave"

    @property
    def home(self) -> str:
        """The package that has all names that are used."""
        return UTILS if any(use.home == UTILS for use in self.uses) else TOP

    def decide(self, free: bool) -> None:
        """Choose a mode; `free`: nothing else is called as our package is."""
        named = [use for use in self.uses if use.path]
        whole = len(named) < len(self.uses)
        if all(use.home for use in named):
            plain = not (self.renamed or self.shared or whole)
            self.mode = "rename" if plain and free else "alias"
        elif any(use.home for use in named) and free and not self.shared:
            self.mode = "beside"


def imports_of(source: Source) -> Iterator[tuple[ast.Import | ast.ImportFrom, list[ast.alias]]]:
    """Yield the import statements that ask for accelerate, with those aliases that do."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found = [alias for alias in node.names if below(alias.name) is not None]
            if found:
                yield node, found
        elif isinstance(node, ast.ImportFrom):
            own = node.level > 0  # a module of the script's package
            if not own and below(node.module or "") is not None:
                yield node, node.names


def below(dotted: str) -> tuple[str, ...] | None:
    """Return a module's path below accelerate, None if it is not of accelerate."""
    first, *rest = dotted.split(".")
    return tuple(rest) if first == OLD else None


def bindings_of(source: Source) -> dict[str, Binding]:
    """Find all names that stand for a module of accelerate, with their uses, and decide."""
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
    found = {local: Binding(local, renamed[local]) for local in paths}
    for alias in ours:
        if alias.asname is None and alias.name.startswith(f"{OLD}.utils"):
            found[OLD].has_utils = True
    others = _bound_otherwise(source, ours)
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id in found and isinstance(node.ctx, ast.Load):
            (path, *more) = sorted(paths[node.id])
            use = _use(source, node, path)
            found[node.id].uses.append(use if not more else Use(node, node, (OLD,), None))
    _add_texts(source, found)
    for local, binding in found.items():
        binding.shared = local in others
        binding.decide(free=TOP not in others)
    return found


def _module_bound(
    statement: ast.Import | ast.ImportFrom, alias: ast.alias
) -> tuple[str, tuple[str, ...], bool] | None:
    """Return the name that an alias binds to a module, its path, and whether it was chosen."""
    if isinstance(statement, ast.Import):
        path = below(alias.name) or ()
        return (OLD, (), False) if alias.asname is None else (alias.asname, path, True)
    path = (*(below(statement.module or "") or ()), alias.name)
    return (alias.asname or alias.name, path, True) if is_module(path) else None


def _use(source: Source, root: ast.Name, path: tuple[str, ...]) -> Use:
    """Follow the attributes after a name to the name of accelerate that is meant."""
    node: ast.expr = root
    editable = True
    while is_module(path):
        parent = source.parents.get(node)
        if not (isinstance(parent, ast.Attribute) and parent.value is node):
            return Use(node, root, () if node is root else (*path, "*"), None)
        node, path = parent, (*path, parent.attr)
        editable = editable and isinstance(parent.ctx, ast.Load)
    if any(isinstance(one, ast.JoinedStr) for one in source.ancestors(node)):
        # older versions of Python do not always know where things stand in an f-string
        editable = editable and source.stands(node)
    return Use(node, root, path, home_of(path) if editable else None)


def _bound_otherwise(source: Source, ours: set[ast.alias]) -> set[str]:
    """Collect the names that anything but an import of accelerate binds, in any scope."""
    names: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias) and node not in ours:
            local = node.asname or node.name.partition(".")[0]
            # our own package is no stranger: a script may have been moved half way
            names |= {local} - ({TOP} if node.name.partition(".")[0] == TOP else set())
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, _NAMED) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
    return names


def _add_texts(source: Source, found: dict[str, Binding]) -> None:
    """Count annotations in quotes as uses that cannot be replaced."""
    if OLD not in found:
        return
    for node in source.nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.Constant) and isinstance(text, str) and _DOTTED.fullmatch(text):
            parents = source.ancestors(node)
            if any(isinstance(one, ast.arg | ast.AnnAssign) for one in parents):
                root = ast.Name(OLD, ast.Load(), lineno=node.lineno, col_offset=0)
                found[OLD].uses.append(Use(node, root, tuple(text.split(".")[1:]), None))
