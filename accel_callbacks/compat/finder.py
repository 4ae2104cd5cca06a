"""A finder of modules that answers ``import accelerate`` with names of this library."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from accel_callbacks.compat.children import child_variables
from accel_callbacks.compat.names import MODULES, PROGRAMS, resolve
from accel_callbacks.compat.public_names import public_names

__all__ = ["VERSION", "install", "is_installed"]

#: The release of Accelerate whose names there are; the part behind it shows in reports.
VERSION = "1.15.0"
_LOCAL = f"{VERSION}+accel.callbacks"
# They ask once whether there is an accelerate, and remember the answer.
_ASKERS = ("transformers", "diffusers", "peft", "trl", "sentence_transformers")
#: Modules of others, and what amends each of them once it is imported.
_AMENDED = {
    "transformers.trainer": "amend_trainer",
    "transformers.trainer_utils": "amend_trainer_utils",
    "transformers.training_args": "amend_training_args",
}


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a distribution named accelerate."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        head = f"Metadata-Version: 2.1\nName: accelerate\nVersion: {_LOCAL}\n"
        # By which sentence-transformers tells the package from another one of its name.
        return f"{head}Home-page: https://github.com/huggingface/accelerate\n"

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _AliasModule(ModuleType):
    """A module of Accelerate, whose names come from the table when they are first asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # only a star import asks for it
            return public_names(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = resolve(self.__name__, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *public_names(self.__name__)})


class AliasFinder(MetaPathFinder, Loader):
    """Finds accelerate and its submodules in the table of names."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module of Accelerate, or of one that is amended; else None."""
        if fullname in _AMENDED:
            return _spec_with_amendment(fullname, path)
        if fullname not in MODULES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        spec = ModuleSpec(fullname, self, origin=__file__, is_package=is_package)
        spec.has_location = True  # so that modules have a `__file__`, which reports print
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _AliasModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the package its version."""
        if module.__name__ == "accelerate":
            module.__version__ = _LOCAL  # type: ignore[attr-defined]

    def get_code(self, fullname: str) -> CodeType:
        """Return what ``python -m`` runs of a module.

        Raises:
            ImportError: the module is no program.
        """
        if fullname not in PROGRAMS:
            programs = ", ".join(sorted(PROGRAMS))
            raise ImportError(f"{fullname} is no program; programs of accelerate are {programs}")
        lines = (
            "if __name__ == '__main__':",  # a process that this one spawns imports it
            "    from accel_callbacks.compat.commands import main_of",
            f"    main_of({PROGRAMS[fullname]!r}, whole_process=True)()",
        )
        return compile("\n".join(lines), f"<{fullname}>", "exec")

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Return the metadata that packages look for before they import accelerate."""
        name = getattr(context, "name", None)
        # An installer asks what is in a folder, where this is not.
        everywhere = context is None or "path" not in vars(context)
        return [_Distribution()] if everywhere and name in (None, "accelerate") else []


def _spec_with_amendment(fullname: str, path: Any) -> ModuleSpec | None:
    """Return the spec of a module with a loader that amends it."""
    spec = PathFinder.find_spec(fullname, path)
    if spec is None or spec.loader is None:
        return spec
    plain = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        plain(module)
        trainer = importlib.import_module("accel_callbacks.compat.trainer")
        getattr(trainer, _AMENDED[fullname])(module)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def is_installed() -> bool:
    """Return whether ``import accelerate`` gets this library.

    Example:
        >>> from accel_callbacks import compat
        >>> compat.is_installed()
        False
    """
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


def install() -> None:
    """Let ``import accelerate`` get this library, in this process and those that it starts.

    An Accelerate that is installed stays as it is; other processes find it. Python processes that
    this one starts stand in by ``PYTHONPATH`` and ``ACCEL_AS_ACCELERATE`` in the environment, which
    gets the options of ``accel launch`` under Accelerate's names too.

    Raises:
        RuntimeError: accelerate, or a package that looks for it at its import, is imported already.

    Example:
        In the first lines of a script:

        >>> from accel_callbacks import compat
        >>> compat.install()  # doctest: +SKIP
        >>> from transformers import Trainer  # doctest: +SKIP
    """
    if is_installed():
        return
    late = [name for name in ("accelerate", *_ASKERS) if name in sys.modules]
    if late:
        raise RuntimeError(
            f"{late[0]} is imported already, and has looked for accelerate: call "
            "accel_callbacks.compat.install() in the first line of the script, or start it with "
            "python -m accel_callbacks.as_accelerate."
        )
    sys.meta_path.insert(0, AliasFinder())
    os.environ.update(child_variables(os.environ))
