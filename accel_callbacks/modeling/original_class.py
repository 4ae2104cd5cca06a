"""The class of a module as the user wrote it."""

from __future__ import annotations

from typing import Any

__all__ = ["class_of"]


def class_of(module: Any) -> type:
    """Return the class of an object; of a sharded module, that before it was sharded.

    ``fully_shard`` puts a class of its own, ``FSDP<name>``, in place of a module's.
    """
    kinds = type(module).__mro__
    sharded = len(kinds) > 2 and kinds[1].__name__ == "FSDPModule"
    return kinds[2] if sharded else kinds[0]
