"""Lightning or pytorch_lightning; unwrapped optimizers."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_callbacks.loop.run import TrainingRun

__all__ = [
    "LightningPackage",
    "bare",
    "bare_optimizers",
    "import_lightning",
    "lightning_callbacks",
    "scheduler_configs",
]

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


class _SchedulerView:
    """A scheduler whose optimizer is the user's own, as Lightning's callbacks compare them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def optimizer(self) -> Any:
        return bare(self._scheduler.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_scheduler":
            raise AttributeError(name)
        return getattr(self._scheduler, name)


def bare(optimizer: Any) -> Any:
    """The user's optimizer inside of a prepared one.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.integrations.lightning.packages import bare
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> bare(Accelerator(cpu=True).prepare(sgd)) is sgd
        True
    """
    from accel_callbacks.optimizer import AcceleratedOptimizer

    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def bare_optimizers(run: TrainingRun) -> list[Any]:
    """The user's optimizers, in the order of ``prepare``."""
    return [bare(optimizer) for optimizer in run.accelerator.optimizers]


def scheduler_configs(package: LightningPackage, run: TrainingRun) -> list[Any]:
    """Lightning's record of each prepared scheduler; they move with optimizer steps."""
    record = package.get("utilities.types", "LRSchedulerConfig")
    return [
        record(scheduler=_SchedulerView(prepared.scheduler), interval="step")
        for prepared in run.accelerator.schedulers
    ]


def lightning_callbacks(run: TrainingRun) -> list[Any]:
    """The run's callbacks; those of Lightning as the user gave them."""
    return [getattr(one, "lightning_callback", one) for one in run.accelerator.callbacks]
