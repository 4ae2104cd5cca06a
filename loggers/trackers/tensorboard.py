"""TensorBoardTracker: event files, through ``torch.utils.tensorboard``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from checkpoint_io.local_files import local_path
from loggers.base import RunInfo, Scalar, Status
from loggers.multimedia.encode import figure_png, gif, markdown, png, size_of_png, wav
from loggers.trackers.event_file import open_summary_writer
from loggers.trackers.tool import ContinuingTracker, require_open
from loggers.values import flat_config, stored_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(ContinuingTracker):
    """Writes event files to ``<logging_dir>/tensorboard``, which may be an fsspec URL.

    A resume continues in the same folder and hides the steps that are logged again. Strings are
    written as text, the config as text and as hyperparameters. TensorBoard stores scalars in single
    precision. While a disk is full or a store is away, events wait in memory.

    Images, videos (GIF, with Pillow), audio, histograms, texts, tables (as text), figures and
    graphs are shown in their tabs. Several images of one name are shown as ``name/0``, ``name/1``,
    ...; captions are a text ``name/captions``.

    Args:
        subdir: folder below ``logging_dir``, default "tensorboard". Ranks above 0 add ``rank<r>``.
        all_ranks: log on every rank, not only on the main one.
        flush_secs: seconds between the uploads to a store, default 10. Each one rewrites the file,
            so that a killed process loses what came after the last one or after the last
            checkpoint; on a local disk each event is written at once.
        **writer_kwargs: extra arguments of ``SummaryWriter``.

    Raises:
        ImportError: from `start`, if torch or tensorboard is not installed.

    Example:
        >>> tracker = TensorBoardTracker(flush_secs=5)
        >>> tracker.raw is None  # the SummaryWriter, once started
        True
    """

    name = "tensorboard"
    owns_files = True
    requires = ("torch", "tensorboard")

    def __init__(
        self,
        subdir: str = "tensorboard",
        *,
        all_ranks: bool = False,
        flush_secs: int = 10,
        **writer_kwargs: Any,
    ) -> None:
        super().__init__(all_ranks=all_ranks)
        self._subdir = subdir
        self._writer_kwargs = {"flush_secs": flush_secs, **writer_kwargs}
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        """Open the ``SummaryWriter``."""
        keep = self._begin(run)
        root = (local_path(run.logging_dir) or run.logging_dir).rstrip("/")
        parts = [root, self._subdir, f"rank{run.rank}" if run.rank else ""]
        kwargs = dict(self._writer_kwargs)
        if keep is not None:
            kwargs.setdefault("purge_step", keep + 1)
        folder = "/".join(part for part in parts if part)
        try:
            self._writer = open_summary_writer(folder, **kwargs)
        except ImportError as error:
            raise ImportError(
                f"the tensorboard tracker needs torch and tensorboard ({error}): "
                "pip install tensorboard"
            ) from error

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the config, without secrets, as JSON under Text and as a row under HParams."""
        from torch.utils.tensorboard.summary import hparams

        config = stored_config(config)
        text = json.dumps(config, indent=2, ensure_ascii=False)
        writer = self._target()
        writer.add_text("config", _code_block(text), 0)
        # Only the session record: the tab then uses the run's own scalars as its metrics, whereas
        # add_hparams would create a second run.
        _, session, _ = hparams(flat_config(config), {})  # type: ignore[no-untyped-call]
        writer.file_writer.add_summary(session, 0)

    def log(
        self,
        scalars: Mapping[str, Scalar],
        step: int,
        *,
        time: float | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        """Write one event per value: a scalar, or text for a str.

        Args:
            scalars: values by tag.
            step: optimizer steps so far.
            time: Unix time of the call.
            walltime: the time to write instead.
            new_style: of ``SummaryWriter.add_scalar``.
            double_precision: of ``SummaryWriter.add_scalar``.
        """
        writer = self._target()
        writer.events.make_room()  # before adding, because a row that fails is tried again
        at = time if walltime is None else walltime
        for tag, value in scalars.items():
            if isinstance(value, str):
                writer.add_text(tag, value, step, at)
            else:
                writer.add_scalar(tag, value, step, at, new_style, double_precision)
        self._note_step(step)

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Write one image each; several of one name are numbered."""
        for name, array in images.items():
            tags = [f"{name}/{i}" for i in range(len(array))] if len(array) > 1 else [name]
            for tag, image in zip(tags, array, strict=True):
                self._add_image(tag, png(image), image.shape, step)
        for name, texts in (captions or {}).items():
            table = markdown(["picture", "caption"], list(enumerate(texts)))
            self._target().add_text(f"{name}/captions", table, step)
        self._note_step(step)

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Write one GIF each, which plays under Images."""
        for name, frames in videos.items():
            self._add_image(name, gif(frames, fps), frames.shape[1:], step)
        self._note_step(step)

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Write one image each."""
        for name, figure in figures.items():
            drawn = figure_png(figure)
            width, height = size_of_png(drawn)
            self._add_image(name, drawn, (height, width, 4), step)
        self._note_step(step)

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Write one WAV each, with all channels."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, samples in audio.items():
            clip = Summary.Audio(
                sample_rate=sample_rate,
                num_channels=1 if samples.ndim == 1 else samples.shape[1],
                length_frames=len(samples),
                encoded_audio_string=wav(samples, sample_rate),
                content_type="audio/wav",
            )
            self._add_value(Summary.Value(tag=name, audio=clip), step)
        self._note_step(step)

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Write a histogram of the finite values, and the count of the others as a scalar."""
        import numpy as np

        writer = self._target()
        for name, values in histograms.items():
            finite = values[np.isfinite(values)]
            if finite.size:  # the writer raises for an empty array
                writer.add_histogram(name, finite, step)
            if finite.size < values.size:
                writer.add_scalar(f"{name}/non_finite", values.size - finite.size, step)
        self._note_step(step)

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Write one text each, which is shown as Markdown."""
        for name, text in texts.items():
            self._target().add_text(name, text, step)
        self._note_step(step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Write the table as Markdown text."""
        self.log_text({name: markdown(columns, rows)}, step)

    def log_graph(self, model: Any, inputs: Any = None) -> None:
        """Write the traced graph; without inputs ``str(model)`` as a text."""
        if inputs is None:
            self._target().add_text("graph", _code_block(str(model)), 0)
        else:
            self._target().add_graph(model, inputs)

    def flush(self) -> None:
        """Write pending events; a store receives them every ``flush_secs``."""
        self._target().events.upload()

    @property
    def unflushed(self) -> bool:
        """Whether events wait for an upload to a store."""
        return self._writer is not None and self._writer.events.is_dirty

    def state_dict(self) -> dict[str, Any]:
        """Write what is pending, also to a store, and return the run id and the last step."""
        if self._writer is not None:
            self._writer.flush()
        return super().state_dict()

    def finish(self, status: Status = "success") -> None:
        """Write what is pending and close the writer."""
        self._end(status)
        writer, self._writer = self._writer, None
        if writer is None:
            return
        events = writer.events
        try:
            writer.close()
        finally:
            events.close()

    @property
    def raw(self) -> Any:
        """The ``SummaryWriter``, or None before `start` and after `finish`."""
        return self._writer

    @property
    def writer(self) -> Any:
        """The same as `raw`; Accelerate's name for it."""
        return self.raw

    def _target(self) -> Any:
        """Return the writer; raise RuntimeError if the tracker is not open."""
        return require_open(self._writer, "TensorBoard")

    def _add_image(self, tag: str, encoded: bytes, shape: Sequence[int], step: int) -> None:
        """Write an encoded image of shape (H, W, C)."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        height, width, channels = shape
        image = Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=encoded
        )
        self._add_value(Summary.Value(tag=tag, image=image), step)

    def _add_value(self, value: Any, step: int) -> None:
        """Write a value that ``SummaryWriter`` has no method for."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer = self._target()
        writer.events.make_room()
        writer.file_writer.add_summary(Summary(value=[value]), step)


def _code_block(text: str) -> str:
    """Return text as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())
