"""Logging to callbacks and trackers, as methods."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from accel_callbacks.tracking.media import Keywords, MediaLogging

__all__ = ["TrackingMethods"]


class TrackingMethods(MediaLogging):
    """What a loop records. Methods return at once: threads of the trackers do the work."""

    @property
    def trackers(self) -> list[Any]:
        """The trackers in use on this process."""
        return self.tracking.trackers

    @property
    def log_with(self) -> list[Any]:
        """What was given as ``log_with``, as a list."""
        return list(self.tracking.log_with)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Keywords | None = None,
    ) -> None:
        """Start the trackers of a loop that does without :meth:`run`, before the first ``log``.

        Args:
            project_name: of the run, for the trackers.
            config: hyperparameters.
            init_kwargs: arguments of the trackers' constructors, by their names, such as
                ``{"wandb": {"tags": ["baseline"]}}``.

        Raises:
            ValueError: ``init_kwargs`` has a tracker that ``log_with`` has not.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).init_trackers("digits", {"lr": 0.1})
        """
        run, hub = self.loop.run, self.tracking.hub
        self.tracking.configure(init_kwargs)
        run.name = project_name
        run.config = dict(config or {})
        if hub is None:
            self._open_trackers()
            return
        warnings.warn(
            "init_trackers after the trackers were started: only the config is recorded. Call it "
            "before the first log.",
            stacklevel=2,
        )
        hub.log_config(run.config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name; one that does nothing where this process does not log.

        The trackers' own threads use it too: what you write through it may be out of order.

        Args:
            name: such as ``"tensorboard"``.
            unwrap: the tool's own object instead, such as its ``SummaryWriter``.

        Raises:
            ValueError: no tracker of this name was asked for.
            RuntimeError: the trackers are not started.

        Example:
            >>> import tempfile
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, log_with="jsonl", project_dir=tempfile.mkdtemp())
            >>> accel.init_trackers("digits")
            >>> accel.get_tracker("jsonl").name
            'jsonl'
            >>> accel.end_training()
        """
        return self.tracking.get(name, unwrap=unwrap)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Keywords | None = None,
    ) -> None:
        """Give values to the callbacks and the trackers; waits neither for the device nor for them.

        Args:
            values: numbers, zero-dimensional tensors or strings, by name; nested dicts are
                flattened with ``/``, None is left out.
            step: optimizer steps so far; ``run.global_step`` where ``None``.
            log_kwargs: further keywords for a tracker's ``log``, by its name.

        Raises:
            TypeError: a value is none of these, or ``step`` is no integer.
            ValueError: ``log_kwargs`` has a tracker that ``log_with`` has not.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> accel.log({"train/loss": 0.5})
            >>> accel.current_run.callback_metrics
            {'train/loss': 0.5}
        """
        run, tracking = self.loop.run, self.tracking
        flat = tracking.flat(values)
        step = run.global_step if step is None else step
        if not tracking.is_open:
            self._open_trackers()
        tracking.put(flat, step, log_kwargs)
        run.callback_metrics.update(flat)
        self.loop.fire("on_log", flat, step)
