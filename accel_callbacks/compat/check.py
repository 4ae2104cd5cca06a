"""Names of Accelerate that a source uses, and what each is here."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from accel_callbacks.compat.names import MODULES, TWINS, home_of, reason_against, resolve

__all__ = ["ALONE", "NameUse", "Status", "UnreadableError", "lone_calls", "name_uses", "status_of"]

Status = Literal["here", "lenient", "alone", "not provided", "unknown"]

#: What is said of a call of :func:`lone_calls`.
ALONE = (
    "all processes have to call it here, as they write together: take it out of the block of one "
    "process; what else is in that stays"
)
_TOGETHER = ("save_state", "save_model")  # which Accelerate calls on one process too
_ONE_PROCESS = {"is_main_process", "is_local_main_process", "is_last_process"}
_ON_ONE_PROCESS = {"on_main_process", "on_local_main_process", "on_last_process", "on_process"}


class UnreadableError(ValueError):
    """Raised for a script that is not valid Python.

    Example:
        >>> from accel_callbacks.compat.check import UnreadableError, name_uses
        >>> try:
        ...     list(name_uses("import accelerate ("))
        ... except UnreadableError as error:
        ...     print("line 1" in str(error))
        True
    """


@dataclass(frozen=True, order=True)
class NameUse:
    """A name of Accelerate in a source.

    Args:
        module: the module that it is taken from.
        name: the name, empty for the module itself.
        line: its line, from 1.
    """

    module: str
    name: str
    line: int

    @property
    def dotted(self) -> str:
        """The name with its module."""
        return f"{self.module}.{self.name}" if self.name else self.module


def name_uses(text: str) -> Iterator[NameUse]:
    """Yield the names of Accelerate that a source imports, or asks a module of it for.

    Args:
        text: the source, which is parsed and not run.

    Raises:
        UnreadableError: it is not valid Python.

    Example:
        >>> from accel_callbacks.compat.check import name_uses
        >>> text = "import accelerate as a\\nfrom accelerate.utils import gather\\na.Accelerator()"
        >>> [(use.dotted, use.line) for use in name_uses(text)]
        [('accelerate.utils.gather', 2), ('accelerate.Accelerator', 3)]
    """
    if "accelerate" not in text:
        return
    tree = parse(text)
    imports = list(imports_of(tree))
    yield from (one.use for one in imports if not is_module(one.use.dotted))
    yield from (lookup.use for lookup in lookups_of(tree, imports))


def parse(text: str) -> ast.Module:
    """Parse a script.

    Raises:
        UnreadableError: the text is not valid Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in the script
            return ast.parse(text)
    except SyntaxError as error:
        raise UnreadableError(f"line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(str(error) or "nested too deeply") from error


def lone_calls(text: str) -> Iterator[NameUse]:
    """Yield the calls that one process makes alone, and all processes have to make here.

    Args:
        text: the source, which is parsed and not run.

    Raises:
        UnreadableError: it is not valid Python.

    Example:
        >>> from accel_callbacks.compat.check import lone_calls
        >>> text = "if accelerator.is_main_process:\\n    accelerator.save_state(path)\\n"
        >>> [(use.name, use.line) for use in lone_calls(text)]
        [('save_state', 2)]
    """
    if "accelerat" not in text or not any(name in text for name in _TOGETHER):
        return
    found: dict[tuple[int, int], NameUse] = {}
    for node in ast.walk(parse(text)):
        blocks: list[ast.stmt] = []
        if isinstance(node, ast.If) and _names(node.test, _ONE_PROCESS):
            negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
            blocks = node.orelse if negated else node.body
        elif isinstance(node, ast.FunctionDef) and any(
            _names(decorator, _ON_ONE_PROCESS) for decorator in node.decorator_list
        ):
            blocks = node.body
        for call in (inner for block in blocks for inner in ast.walk(block)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                name, place = call.func.attr, (call.lineno, call.col_offset)
                if name in _TOGETHER:
                    found[place] = NameUse("accelerate.Accelerator", name, call.lineno)
    yield from (use for _, use in sorted(found.items()))


def _names(expression: ast.expr, names: set[str]) -> bool:
    """Return whether an expression asks an object for one of some names."""
    return any(
        isinstance(node, ast.Attribute) and node.attr in names for node in ast.walk(expression)
    )


class Import(NamedTuple):
    """A name that a statement imports from accelerate, or a module of it."""

    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    use: NameUse

    @property
    def binding(self) -> tuple[str, str] | None:
        """The local name that is bound to a module, and that module; None for another name."""
        name, local = self.alias.name, self.alias.asname
        if isinstance(self.statement, ast.Import):
            return (local, name) if local else ("accelerate", "accelerate")
        return (local or name, self.use.dotted) if is_module(self.use.dotted) else None


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """Yield what a script imports of accelerate, those of one statement after another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses = [(alias, NameUse(alias.name, "", node.lineno)) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:  # else from its own package
            module = node.module or ""
            uses = [(alias, NameUse(module, alias.name, alias.lineno)) for alias in node.names]
        else:
            continue
        for alias, use in uses:
            if use.module.partition(".")[0] == "accelerate":
                yield Import(node, alias, use)


class Lookup(NamedTuple):
    """A name that is looked up in a local name, which is bound to a module of accelerate."""

    local: str
    bound: str
    use: NameUse


def lookups_of(tree: ast.Module, imports: Iterable[Import]) -> Iterator[Lookup]:
    """Yield what a script looks up in modules of accelerate."""
    bound: dict[str, set[str]] = defaultdict(set)
    for local, module in filter(None, (one.binding for one in imports)):
        bound[local].add(module)

    def modules_of(node: ast.expr) -> list[tuple[str, str, str]]:
        """Return the modules that an expression may be, with the local name and its module."""
        if isinstance(node, ast.Name):
            return [(node.id, module, module) for module in sorted(bound.get(node.id, ()))]
        if not isinstance(node, ast.Attribute):
            return []
        inner = [(a, b, f"{module}.{node.attr}") for a, b, module in modules_of(node.value)]
        return [one for one in inner if is_module(one[2])]

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            for local, begin, module in modules_of(node.value):
                use = NameUse(module, node.attr, node.lineno)
                if not is_module(use.dotted):
                    yield Lookup(local, begin, use)


def is_module(dotted: str) -> bool:
    """Return whether a dotted name is a module of accelerate, and not the function tqdm."""
    return dotted in MODULES and dotted != "accelerate.utils.tqdm"


def status_of(module: str, name: str) -> tuple[Status, str]:
    """Return what a name of Accelerate is here, and why it is not.

    Args:
        module: the module that it is taken from.
        name: the name, empty for the module itself.

    Returns:
        ``"here"``; ``"lenient"`` for a class that takes Accelerate's arguments where this library's
        own is stricter; ``"not provided"`` if it raises when it is used; ``"unknown"`` if its
        import fails. Then the reason of the last two, else an empty text.

    Example:
        >>> from accel_callbacks.compat.check import status_of
        >>> status_of("accelerate", "Accelerator"), status_of("accelerate.utils", "set_seed")
        (('lenient', ''), ('here', ''))
    """
    if module not in MODULES:
        return "unknown", "this library, which stands in for accelerate, has no such module."
    if name == "*":
        return "unknown", "a star import takes names that nobody can list: import them one by one."
    if name and f"{module}.{name}" not in MODULES and not _is_own(name):
        try:
            resolve(module, name)
        except AttributeError:
            return "unknown", "this library, which stands in for accelerate, has no such name."
        home = home_of(name)
        if home == TWINS:
            return "lenient", ""
        if home is None and (reason := reason_against(name)):
            return "not provided", reason
    return "here", ""


def _is_own(name: str) -> bool:
    """Return whether a name is one that each module has."""
    return name.startswith("__") and name.endswith("__")
