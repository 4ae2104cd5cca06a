"""Which checkpoints of a run stay, and the removal of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from accel_callbacks.callbacks.monitor import Monitor
from accel_callbacks.callbacks.on_exception_checkpoint import is_after_error

if TYPE_CHECKING:
    from checkpoint_io import CheckpointFolder, CheckpointInfo

__all__ = ["Keep", "Retention"]

Keep = Callable[[Sequence["CheckpointInfo"]], Iterable["CheckpointInfo"]]


class Retention:
    """What a Checkpoint keeps: so many, or what a policy picks.

    Args:
        keep_last: newest ones to keep; ``None`` keeps all.
        keep_best: best ones to keep, where there is a monitor.
        keep_every: keep multiples of this step as well.
        monitor: what best means.
        keep: a policy of ``checkpoint_io``, instead of the numbers.

    Raises:
        ValueError: a number below 1, or a policy and numbers.
        TypeError: ``keep`` is no policy.

    Example:
        >>> from accel_callbacks.callbacks.checkpoint_keep import Retention
        >>> Retention(keep_last=3, keep_best=1)([])
        []
    """

    def __init__(
        self,
        keep_last: int | None = None,
        keep_best: int = 1,
        keep_every: int | None = None,
        monitor: Monitor | None = None,
        keep: Keep | None = None,
    ) -> None:
        numbers = {"keep_last": keep_last, "keep_best": keep_best, "keep_every": keep_every}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if keep is not None and not callable(keep):
            raise TypeError(f"keep={keep!r} is no policy: write keep_last(3) | keep_every(1000).")
        self._keep = keep
        self._last, self._best, self._every = keep_last, keep_best, keep_every
        self._monitor = monitor

    @property
    def keeps_all(self) -> bool:
        """Nothing is ever removed."""
        return self._keep is None and self._last is None

    def __call__(self, infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Those to keep; of what was saved after an error, always the newest."""
        normal = [info for info in infos if not is_after_error(info.name)]
        after_errors = [info for info in infos if is_after_error(info.name)]
        return [*self._policy()(normal), *after_errors[-1:]]

    def _policy(self) -> Keep:
        from checkpoint_io import any_of, keep_best, keep_every, keep_last

        if self._keep is not None:
            return self._keep
        if self._last is None:
            return lambda infos: infos
        policies = [keep_last(self._last)]
        if self._every is not None:
            policies.append(keep_every(self._every))
        if self._monitor is not None:
            policies.append(keep_best(self._best, self._monitor.name, self._monitor.mode))
        return any_of(*policies)

    def prune(self, folder: CheckpointFolder, run_id: str, resumed_from: str | None) -> None:
        """Remove what is not to be kept of this run; never the one that it resumed from."""
        if self.keeps_all:
            return
        protected = () if resumed_from is None else (resumed_from,)
        try:
            folder.prune(self, run_id=run_id, protect=protected)
        except Exception as error:  # each store's driver has errors of its own
            # The new checkpoint is safe; old ones that stay only take up room.
            problem = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"older checkpoints in {folder.url} were not removed: {problem}", stacklevel=2
            )
