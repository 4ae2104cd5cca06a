"""LightningPackage: the installed Lightning, `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_callbacks.loop.run import TrainingRun

__all__ = ["LightningPackage", "import_lightning", "unwrap_optimizer", "unwrapped_optimizers"]

_ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_NO_CHANGE = nullcontext()
_INSTALL = 'pip install "lightning>=2.6.6"'


class LightningPackage:
    """``lightning.pytorch`` or ``pytorch_lightning``; objects of the two do not mix.

    Args:
        root: name of one of the two.

    Raises:
        ImportError: it is not installed; the message has the command.
    """

    def __init__(self, root: str = "lightning.pytorch") -> None:
        self.root = root
        try:
            self.module = importlib.import_module(root)
        except ImportError as error:
            raise ImportError(f"this needs Lightning: {_INSTALL}") from error
        utilities = importlib.import_module("lightning_utilities.core.rank_zero")
        self._rank_zero_only: Any = utilities.rank_zero_only  # one for both packages

    @classmethod
    def of(cls, callback: Any) -> LightningPackage | None:
        """Return the package whose ``Callback`` an object is an instance of, None if neither."""
        for kind in type(callback).__mro__:
            root = _ROOTS.get(kind.__module__.partition(".")[0])
            if root is not None and kind.__name__ == "Callback":
                return cls(root)
        return None

    def get(self, module: str, name: str) -> Any:
        """Return a name from one of the package's modules."""
        return getattr(importlib.import_module(f"{self.root}.{module}"), name)

    def owns(self, cls: type) -> bool:
        """Return whether a class is the package's own, not a user's."""
        return cls.__module__.partition(".")[0] == self.root.partition(".")[0]

    def as_rank(self, rank: int) -> AbstractContextManager[None]:
        """Return a context in which Lightning's ``rank_zero_only`` has this rank."""
        known = getattr(self._rank_zero_only, "rank", None) == rank
        return _NO_CHANGE if known else _set_rank(self._rank_zero_only, rank)


@contextmanager
def _set_rank(rank_zero_only: Any, rank: int) -> Iterator[None]:
    """Set the rank inside, and restore it at the exit."""
    before = getattr(rank_zero_only, "rank", None)
    rank_zero_only.rank = rank
    try:
        yield
    finally:
        if before is None:
            del rank_zero_only.rank
        else:
            rank_zero_only.rank = before


def import_lightning(name: str | None = None) -> LightningPackage:
    """Return the package of a name, or the installed one, ``lightning`` if both are.

    Raises:
        ImportError: it is not installed, or neither is; the message has the command.
    """
    if name is not None:
        return LightningPackage(_ROOTS.get(name, name))
    try:
        return LightningPackage("lightning.pytorch")
    except ImportError:
        if importlib.util.find_spec("pytorch_lightning") is None:
            raise
        return LightningPackage("pytorch_lightning")


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer inside of a prepared one, any other as it is."""
    from accel_callbacks.optimizer import AcceleratedOptimizer

    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def unwrapped_optimizers(run: TrainingRun) -> list[Any]:
    """Return the user's optimizers, in the order of ``prepare``."""
    return [unwrap_optimizer(optimizer) for optimizer in run.accelerator.optimizers]
