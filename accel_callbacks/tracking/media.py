"""Pictures, tables, sounds and so on for the trackers, as methods."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from accel_callbacks.loop.loop import Loop
from accel_callbacks.strategies import Strategy
from accel_callbacks.tracking.trackers import Tracking

if TYPE_CHECKING:
    from loggers import TrackerHub

__all__ = ["Keywords", "MediaMethods"]

Keywords = Mapping[str, Mapping[str, Any]]
"""Keywords by the name of a tracker."""


class MediaMethods:
    """What a loop records beside numbers. One warning a kind names the trackers that lack it."""

    tracking: Tracking
    loop: Loop
    strategy: Strategy

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Keywords | None = None,
        *,
        captions: Mapping[str, Sequence[str] | str] | None = None,
        channels: Literal["first", "last"] | None = None,
    ) -> None:
        """Give pictures to the trackers that record them; one warning names the others.

        Args:
            values: by name, tensors of shape (H, W), (C, H, W) or (N, C, H, W), arrays with their
                channels last, PIL images, or lists of these; floats in [0, 1], or 0 to 255.
            step: optimizer steps so far; ``run.global_step`` where ``None``.
            log_kwargs: further keywords for a tracker's ``log_images``, by its name.
            captions: under the same names, a text for each picture.
            channels: ``"first"`` or ``"last"``, where it is not as said above.

        Raises:
            TypeError: a value is no picture.
            ValueError: a shape is none of these.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> accel.log_images({"digits": torch.rand(4, 1, 8, 8)}, captions={"digits": "1234"})
        """
        hub, step = self._media(step)
        if hub is not None:
            hub.log_images(
                values, step, captions=captions, channels=channels, log_kwargs=log_kwargs
            )

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Keywords | None = None,
    ) -> None:
        """Give a table to the trackers that record tables.

        Args:
            table_name: its name.
            columns: heads of the columns.
            data: rows of numbers, bool, str and None; anything else is written as its text.
            dataframe: a pandas data frame instead of ``columns`` and ``data``.
            step: optimizer steps so far; ``run.global_step`` where ``None``.
            log_kwargs: further keywords for a tracker's ``log_table``, by its name.

        Raises:
            ValueError: rows are not as long as ``columns``, or neither is there.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> accel.log_table("wrong", ["image", "label"], [[7, "nine"]])
        """
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.values.tolist()
        if columns is None or data is None:
            raise ValueError("log_table needs columns and data, or a dataframe")
        hub, step = self._media(step)
        if hub is not None:
            hub.log_table(table_name, columns, data, step, log_kwargs=log_kwargs)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Give distributions to the trackers: by name tensors, arrays or lists of numbers.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_histogram({"weights": torch.randn(100)})
        """
        hub, step = self._media(step)
        if hub is not None:
            hub.log_histogram(values, step)

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        """Give texts to the trackers, by name.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_text({"sample": "Once upon a time"})
        """
        hub, step = self._media(step)
        if hub is not None:
            hub.log_text(values, step)

    def log_audio(
        self, values: Mapping[str, Any], step: int | None = None, *, sample_rate: int
    ) -> None:
        """Give sounds to the trackers.

        Args:
            values: by name, tensors (samples,) or (channels, samples), or arrays (samples,) or
                (samples, channels); floats in [-1, 1], or integers.
            step: optimizer steps so far; ``run.global_step`` where ``None``.
            sample_rate: samples a second.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_audio({"beep": torch.zeros(800)}, sample_rate=8000)
        """
        hub, step = self._media(step)
        if hub is not None:
            hub.log_audio(values, step, sample_rate=sample_rate)

    def log_video(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        *,
        fps: int = 4,
        channels: Literal["first", "last"] | None = None,
    ) -> None:
        """Give films to the trackers: by name tensors (T, C, H, W) or arrays (T, H, W, C).

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_video({"rollout": torch.rand(8, 3, 16, 16)}, fps=8)
        """
        hub, step = self._media(step)
        if hub is not None:
            hub.log_video(values, step, fps=fps, channels=channels)

    def log_figure(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Give matplotlib figures to the trackers; leave them as they are afterwards.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_figure({})
        """
        hub, step = self._media(step)
        if hub is not None:
            hub.log_figure(values, step)

    def log_artifact(
        self, path: str | os.PathLike[str], *, name: str | None = None, kind: str = "file"
    ) -> None:
        """Give a file or folder to the trackers; it has to stay there until they have it.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_artifact("README.md", kind="notes")
        """
        hub, _ = self._media(None)
        if hub is not None:
            hub.log_artifact(path, name=name, kind=kind)

    def log_graph(self, model: Any, inputs: Any = None) -> None:
        """Give a model's graph to the trackers; this waits for them, half a minute at most.

        Args:
            model: prepared or not; it is called as you built it, in eval mode.
            inputs: what it is called with, where the tool needs that.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_graph(torch.nn.Linear(1, 1), torch.ones(1, 1))
        """
        hub, _ = self._media(None)
        if hub is not None:
            hub.log_graph(self.strategy.unwrap(model), inputs)

    def _media(self, step: int | None) -> tuple[TrackerHub | None, int]:
        """The open trackers, if there are any, and the step to log at."""
        if not self.tracking.is_open:
            self.tracking.open(self.loop.run)
        return self.tracking.hub, self.loop.run.global_step if step is None else step
