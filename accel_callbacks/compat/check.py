"""Names of Accelerate that a source uses, and what each is here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from accel_callbacks.compat.migrate.imports import bindings_of, imports_of
from accel_callbacks.compat.migrate.source import Source
from accel_callbacks.compat.names import MODULES, NOT_PROVIDED, home_of, resolve

__all__ = ["NameUse", "Status", "name_uses", "status_of"]

Status = Literal["here", "lenient", "not provided", "unknown"]
_TWINS = home_of("DataLoaderConfiguration")


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
        accel_callbacks.compat.migrate.UnreadableError: it is not valid Python.

    Example:
        >>> from accel_callbacks.compat.check import name_uses
        >>> text = "import accelerate as a\\nfrom accelerate.utils import gather\\na.Accelerator()"
        >>> [(use.dotted, use.line) for use in name_uses(text)]
        [('accelerate.utils.gather', 2), ('accelerate.Accelerator', 3)]
    """
    if "accelerate" not in text:
        return
    source = Source(text)
    for statement, aliases in imports_of(source):
        for alias in aliases:
            if isinstance(statement, ast.Import):
                use = NameUse(alias.name, "", statement.lineno)
            else:
                use = NameUse(statement.module or "", alias.name, alias.lineno)
            if use.dotted not in MODULES:
                yield use
    for binding in bindings_of(source).values():
        for attribute in binding.uses:
            *inner, name = attribute.path or ("*",)
            if name != "*":  # the module itself is passed on
                yield NameUse(".".join(("accelerate", *inner)), name, attribute.node.lineno)


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
        if home_of(name) is None and name in NOT_PROVIDED:
            return "not provided", NOT_PROVIDED[name]
        if home_of(name) == _TWINS:
            return "lenient", ""
    return "here", ""


def _is_own(name: str) -> bool:
    """Return whether a name is one that each module has."""
    return name.startswith("__") and name.endswith("__")
