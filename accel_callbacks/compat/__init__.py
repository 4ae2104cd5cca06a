"""`import accelerate` that gets this library: for scripts and packages written for Accelerate.

Nothing else of the library imports this room.
"""

from __future__ import annotations

from accel_callbacks.compat.finder import install, is_installed

__all__ = ["install", "is_installed"]
