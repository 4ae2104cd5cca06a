"""Guard against a user's file that shadows one of our sibling packages."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

__all__ = ["require_neighbor"]


@functools.cache
def require_neighbor(name: str) -> None:
    """Check that ``import name`` finds our package, and not a file next to the script.

    Args:
        name: ``"loggers"`` or ``"checkpoint_io"``.

    Raises:
        ImportError: another module of this name is found first; the text names it.

    Example:
        >>> from accel_callbacks._siblings import require_neighbor
        >>> require_neighbor("loggers")
    """
    ours = Path(__file__).resolve().parent.parent / name
    found = _origin(name)
    if found is not None and found.resolve().parent == ours:
        return
    where = "nothing" if found is None else str(found)
    raise ImportError(
        f"accel_callbacks needs its own package {name!r}, but `import {name}` finds {where}. "
        f"Rename that file or folder (or remove the package that brought it), or start the "
        f"script from another folder; ours is in {ours.parent}."
    )


def _origin(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    if loaded is not None:
        # A namespace package has no file, only a path.
        file = getattr(loaded, "__file__", None) or next(
            iter(getattr(loaded, "__path__", ())), None
        )
        return Path(file) if file else None
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.origin is None:  # a namespace package
        locations = list(spec.submodule_search_locations or ())
        return Path(locations[0]) if locations else None
    return Path(spec.origin)
