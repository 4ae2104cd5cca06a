"""Classes of Accelerate that make objects of this library, and know them as their instances."""

from __future__ import annotations

from typing import Any

__all__ = ["StandIn"]


class StandIn(type):
    """A class of which the objects of another class, ``stands_for``, are instances too."""

    stands_for: type[Any]

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(
            instance, cls.__dict__.get("stands_for", ())
        )
