"""Lightning under either of its names, imported only when one of its callbacks is there."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LightningPackage", "import_lightning"]

_ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_NOTHING = nullcontext()
_INSTALL = 'pip install "lightning>=2.6.6"'


class LightningPackage:
    """``lightning.pytorch`` or ``pytorch_lightning``: the two do not mix.

    Args:
        root: which of the two.

    Raises:
        ImportError: it is not installed; says how to.
    """

    def __init__(self, root: str = "lightning.pytorch") -> None:
        self.root = root
        try:
            self.module = importlib.import_module(root)
        except ImportError as error:
            raise ImportError(f"this needs Lightning: {_INSTALL}") from error
        utilities = importlib.import_module("lightning_utilities.core.rank_zero")
        self._note: Any = utilities.rank_zero_only  # one for both packages

    @classmethod
    def of(cls, callback: Any) -> LightningPackage | None:
        """The package whose ``Callback`` an object is an instance of; None if of neither."""
        for one in type(callback).__mro__:
            root = _ROOTS.get(one.__module__.partition(".")[0])
            if root is not None and one.__name__ == "Callback":
                return cls(root)
        return None

    def get(self, module: str, name: str) -> Any:
        """A name from one of the package's modules."""
        return getattr(importlib.import_module(f"{self.root}.{module}"), name)

    def owns(self, cls: type) -> bool:
        """Whether a class is the package's own, and no user's."""
        return cls.__module__.partition(".")[0] == self.root.partition(".")[0]

    def as_rank(self, rank: int) -> AbstractContextManager[None]:
        """Lightning's global note of the rank is right inside, and as it was afterwards."""
        right = getattr(self._note, "rank", None) == rank
        return _NOTHING if right else _as_rank(self._note, rank)


@contextmanager
def _as_rank(note: Any, rank: int) -> Iterator[None]:
    before = getattr(note, "rank", None)
    note.rank = rank
    try:
        yield
    finally:
        if before is None:
            del note.rank
        else:
            note.rank = before


def import_lightning() -> LightningPackage:
    """The package that is installed, ``lightning`` first.

    Raises:
        ImportError: neither is; says how to install it.
    """
    try:
        return LightningPackage("lightning.pytorch")
    except ImportError:
        if importlib.util.find_spec("pytorch_lightning") is None:
            raise
        return LightningPackage("pytorch_lightning")
