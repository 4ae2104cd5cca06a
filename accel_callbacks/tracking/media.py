"""MediaLogging: images, tables, audio and other media for the trackers, as methods."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from accel_callbacks.loop.loop import Loop
    from accel_callbacks.strategy.base import Strategy
    from accel_callbacks.tracking.trackers import Tracking
    from loggers import TrackerHub

__all__ = ["Keywords", "MediaLogging", "table_of"]

Keywords = Mapping[str, Mapping[str, Any]]
"""Keyword arguments by tracker name."""


class MediaLogging:
    """The media methods of an Accelerator, each of which calls that of the tracker hub.

    Without trackers they do nothing. Trackers that do not record a kind of media are skipped, with
    one warning per kind.
    """

    # Set by the Accelerator. The methods differ from the hub's in the names of their parameters,
    # which are Accelerate's, and in the default of ``step``.
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
        """Log images to the trackers that record them, with one warning that names the others.

        Args:
            values: by name, tensors of shape (H, W), (C, H, W) or (N, C, H, W), arrays with
                channels last, PIL images, or lists of these; floats in [0, 1], or integers in
                [0, 255].
            step: optimizer steps so far; ``run.global_step`` if ``None``.
            log_kwargs: extra keywords of a tracker's ``log_images``, by tracker name.
            captions: one text per image, under the same names.
            channels: ``"first"`` or ``"last"``; by default first for tensors and last for arrays.

        Raises:
            TypeError: a value is not an image.
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
        """Log a table to the trackers that record tables.

        Args:
            table_name: name of the table.
            columns: names of the columns.
            data: rows of numbers, bool, str and None; other cells are converted with ``str``.
            dataframe: a pandas ``DataFrame`` instead of ``columns`` and ``data``.
            step: optimizer steps so far; ``run.global_step`` if ``None``.
            log_kwargs: extra keywords of a tracker's ``log_table``, by tracker name.

        Raises:
            ValueError: a row is not as long as ``columns``, or there is neither ``dataframe`` nor
                ``columns`` and ``data``.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> accel.log_table("wrong", ["image", "label"], [[7, "nine"]])
        """
        columns, data = table_of(columns, data, dataframe)
        hub, step = self._media(step)
        if hub is not None:
            hub.log_table(table_name, columns, data, step, log_kwargs=log_kwargs)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log histograms of tensors, arrays or lists of numbers, by name; finite values only.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_histogram({"weights": torch.randn(100)})
        """
        hub, step = self._media(step)
        if hub is not None:
            hub.log_histogram(values, step)

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        """Log texts, by name.

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
        """Log audio clips.

        Args:
            values: by name, tensors (samples,) or (channels, samples), or arrays (samples,) or
                (samples, channels); floats in [-1, 1], or integers.
            step: optimizer steps so far; ``run.global_step`` if ``None``.
            sample_rate: samples per second.

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
        """Log videos: by name tensors (T, C, H, W) or arrays (T, H, W, C).

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_video({"rollout": torch.rand(8, 3, 16, 16)}, fps=8)
        """
        hub, step = self._media(step)
        if hub is not None:
            hub.log_video(values, step, fps=fps, channels=channels)

    def log_figure(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log matplotlib figures, by name; do not change or close them afterwards.

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
        """Log a file or folder; it must not move until the trackers have read it.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_artifact("README.md", kind="notes")
        """
        hub, _ = self._media(None)
        if hub is not None:
            hub.log_artifact(path, name=name, kind=kind)

    def log_graph(self, model: Any, inputs: Any = None) -> None:
        """Log a model's graph; blocks until the trackers are done, for 30 seconds at most.

        Args:
            model: prepared or not; the unwrapped model is called, in eval mode.
            inputs: example inputs, where the tool needs them.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).log_graph(torch.nn.Linear(1, 1), torch.ones(1, 1))
        """
        hub, _ = self._media(None)
        if hub is not None:
            hub.log_graph(self.strategy.unwrap(model), inputs)

    def _media(self, step: int | None) -> tuple[TrackerHub | None, int]:
        """Return the hub, opened if necessary, or None without trackers; and the step."""
        if not self.tracking.is_open:
            self.tracking.open(self.loop.run)
        return self.tracking.hub, self.loop.run.global_step if step is None else step


def table_of(
    columns: Sequence[str] | None, data: Sequence[Sequence[Any]] | None, dataframe: Any
) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    """Return the columns and rows of a table that is given by them, or as a data frame.

    Raises:
        ValueError: neither is given.
    """
    if dataframe is not None:
        return list(dataframe.columns), dataframe.values.tolist()
    if columns is None or data is None:
        raise ValueError("log_table needs columns and data, or a dataframe")
    return columns, data
