"""`import accelerate` that gets this library: for scripts and packages written for Accelerate.

A script enters by :func:`install`, ``python -m accel_callbacks.as_accelerate`` or ``accel launch
--as_accelerate``: each puts a finder (``finder.py``) in front of the import system. What a name of
Accelerate is, ``names.py`` says when it is first asked for: a name of this library, a twin of one
with Accelerate's arguments (``twins.py``, ``handlers.py``, ``trackers.py``), a function of this
room, or a class that raises NotProvided with the reason. ``accel compat`` and ``accel migrate`` ask
the same table about a source. Names that the library itself has from Accelerate (``PartialState``,
``dispatch_model``, ``AlignDevicesHook``, ``MegatronLMPlugin``) are here too, and are entered from
``accel_callbacks`` and ``accel_callbacks.utils``.

Never here: an import of torch or of a tracker by :func:`install` alone, a pickle that is run, a
second way to train or to save. A twin takes foreign arguments and calls this library. Nothing else
of the library imports this room, but for doors and tables that do so late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

if TYPE_CHECKING:
    from accel_callbacks.compat.finder import install as install
    from accel_callbacks.compat.finder import is_installed as is_installed

__all__ = ["install", "is_installed"]

# A process that only makes a mistake looks up a foreign name, and stands in for nothing.
__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "finder"))
