"""Import public names from their modules on first use (PEP 562)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import Any

__all__ = ["foreign_name", "lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its names lazily.

    Args:
        package: the package's ``__name__``.
        homes: for each name its module, relative to the package.

    Example:
        >>> from accel_callbacks._lazy import lazy_names
        >>> get, _ = lazy_names("accel_callbacks", {"RemoteError": "errors"})
        >>> get("RemoteError").__name__
        'RemoteError'
    """

    def get(name: str) -> Any:
        if name not in homes:
            if not is_module(name):
                _refuse_import(package, name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        _require_own_packages()
        value = getattr(importlib.import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def is_module(name: str) -> bool:
        # `from package import module` asks for the attribute first.
        path = vars(sys.modules[package]).get("__path__")
        return path is not None and PathFinder.find_spec(f"{package}.{name}", path) is not None

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


@functools.cache  # once it holds, for all names
def _require_own_packages() -> None:
    """Refuse a file or folder beside the script that has the name of one of our packages.

    All names of the library are looked up here, so that nothing else asks for it.
    """
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in ("checkpoint_io", "loggers"):
        spec = importlib.util.find_spec(name)
        # A namespace package has no file, only folders.
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        found = next(filter(None, places), None)
        if found is None or os.path.dirname(os.path.realpath(found)) != os.path.join(root, name):
            raise ImportError(
                f"accel_callbacks needs its own package {name!r}, but `import {name}` finds "
                f"{found or 'nothing'}. Rename that file or folder (or remove the package that "
                f"brought it), or start the script from another folder; ours is in {root}."
            )


def _refuse_import(package: str, name: str) -> None:
    """Raise for a name of another library, or of an earlier version of this one."""
    from accel_callbacks.errors.removed import REMOVED

    # No AttributeError: `from package import name` would replace its text.
    if instead := foreign_name("IMPORTS", name):
        raise ImportError(f"{name} {instead}", name=package)
    if name in REMOVED:
        raise ImportError(f"{package} has no {name!r}. {REMOVED[name]}", name=package)


def foreign_name(table: str, name: str) -> str:
    """Return what a name of another library is here; an empty string of an unknown one.

    Args:
        table: one of ``accel_callbacks.compat.foreign_names``.
        name: what was written.

    Example:
        >>> from accel_callbacks._lazy import foreign_name
        >>> foreign_name("OPTIONS", "precision")
        'Give mixed_precision="bf16", "fp16" or "fp8".'
    """
    try:
        from accel_callbacks.compat import foreign_names
    except ModuleNotFoundError as error:
        if error.name != "accel_callbacks.compat":
            raise
        return ""  # a core without that room answers as for any other mistake
    tables: Mapping[str, str] = getattr(foreign_names, table)
    return tables.get(name, "")
