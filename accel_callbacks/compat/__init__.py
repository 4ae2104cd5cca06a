"""`import accelerate` that gets this library: for scripts and packages written for Accelerate.

Nothing else of the library imports this room, but for doors and tables that do so late.
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
