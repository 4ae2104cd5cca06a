"""Pictures, tables, sounds, ...: taken on the training thread, converted on the hub's."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from loggers.closing import answers
from loggers.items import Media, Pending, Reply
from loggers.media.convert import (
    Channels,
    as_audio,
    as_numbers,
    as_pictures,
    as_table,
    check_shape,
    held,
    size_of,
)
from loggers.shutdown import HubParts

__all__ = ["MediaMethods"]


class MediaMethods(HubParts):
    """The ``log_...`` methods of a hub beside `log`.

    A call copies what it is given, on its device, and returns. Trackers without that kind of media
    are left out, with one warning a kind that names them.
    """

    def log_images(
        self,
        images: Mapping[str, Any],
        step: int,
        *,
        captions: Mapping[str, Sequence[str] | str] | None = None,
        channels: Channels | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record pictures.

        Args:
            images: by name, tensors or arrays of shape (H, W), (H, W, C) or (N, H, W, C), or PIL
                images, or lists of these; floats in [0, 1] or integers in [0, 255].
            step: optimizer steps done.
            captions: under the same names, a text for each picture.
            channels: "first" or "last"; first in tensors, last in arrays if None.
            log_kwargs: further keywords of a tracker's ``log_images``, by the tracker's name.

        Raises:
            TypeError: a value is no picture.
            ValueError: a shape is none of these.

        >>> import numpy as np
        >>> from loggers import RunInfo, TrackerHub
        >>> with TrackerHub([], run=RunInfo("digits", "runs", "a1")) as hub:
        ...     hub.log_images({"digit": np.zeros((8, 8))}, step=1, captions={"digit": "zero"})
        """
        for name, value in images.items():
            check_shape(name, value, channels)
        texts = {
            name: [text] if isinstance(text, str) else list(text)
            for name, text in (captions or {}).items()
        }
        kwargs: dict[str, Any] = {"captions": texts} if texts else {}

        def convert(kept: dict[str, Any]) -> tuple[Any, ...]:
            return ({name: as_pictures(value, channels) for name, value in kept.items()},)

        self._take("images", step, images, convert, kwargs, log_kwargs)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        step: int,
        *,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record a table; what is no number, bool, str or None is written as its text.

        Raises:
            ValueError: a row is not as long as ``columns``.
        """
        heads = [str(column) for column in columns]
        for row in rows:
            if len(row) != len(heads):
                raise ValueError(
                    f"table {name!r} has {len(heads)} columns and a row of {len(row)} cells"
                )
        kept = [held(list(row)) for row in rows]

        def convert(cells: list[list[Any]]) -> tuple[Any, ...]:
            return name, heads, as_table(cells)

        self._take("table", step, kept, convert, {}, log_kwargs)

    def log_histogram(self, histograms: Mapping[str, Any], step: int) -> None:
        """Record distributions: by name tensors, arrays or lists of numbers; finite ones count."""
        self._take("histogram", step, histograms, _converter(as_numbers), {})

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts by name."""
        self._take("text", step, texts, _converter(str), {})

    def log_audio(self, audio: Mapping[str, Any], step: int, *, sample_rate: int) -> None:
        """Record sounds.

        Args:
            audio: by name, tensors of shape (samples,) or (channels, samples), or arrays of shape
                (samples,) or (samples, channels); floats in [-1, 1], or integers.
            step: optimizer steps done.
            sample_rate: samples a second.
        """
        kwargs = {"sample_rate": operator.index(sample_rate)}
        self._take("audio", step, audio, _converter(as_audio), kwargs)

    def log_video(
        self,
        videos: Mapping[str, Any],
        step: int,
        *,
        fps: int = 4,
        channels: Channels | None = None,
    ) -> None:
        """Record films: by name tensors (T, C, H, W) or arrays (T, H, W, C), as pictures are."""
        for name, value in videos.items():
            check_shape(name, value, channels, film=True)
        convert = _converter(lambda value: as_pictures(value, channels))
        self._take("video", step, videos, convert, {"fps": operator.index(fps)})

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures by name; leave them as they are afterwards."""
        self._take("figure", step, figures, lambda kept: (kept,), {}, copy=False)

    def log_artifact(
        self, path: str | os.PathLike[str], *, name: str | None = None, kind: str = "file"
    ) -> None:
        """Record a file or folder; it has to stay where it is until the trackers have it."""
        place = os.fspath(path)
        kwargs = {"name": name, "kind": kind}
        self._take("artifact", None, place, lambda kept: (kept,), kwargs, copy=False)

    def log_graph(self, model: Any, inputs: Any = None, *, timeout: float = 30.0) -> None:
        """Record a model's graph. This waits for the trackers: the model must not change meanwhile.

        The model is in eval mode during that, and gradients are off.

        Args:
            model: an ``nn.Module``, not wrapped for several processes.
            inputs: what it is called with, where the tool needs that.
            timeout: seconds to wait at most; trackers that are not there by then leave it out.
        """
        if not self._wants("graph"):
            return
        deadline = time.monotonic() + timeout
        with _still(model):
            for writer in self._writers:  # one after the other, because there is one model
                if "graph" in writer.guard.kinds:
                    reply, in_time = Reply(), [True]
                    writer.ask_graph(reply, in_time, model, inputs)
                    in_time[0] = bool(answers(reply, 1, deadline))

    def _wants(self, kind: str) -> bool:
        """Say whether a tracker has this kind; warn once of those that have not."""
        if not self._accepting(f"log_{kind}"):
            return False
        lacking = [repr(w.name) for w in self._writers if kind not in w.guard.kinds]
        if len(lacking) == 1:
            text = f"tracker {lacking[0]} does not record {kind}: it is left out"
            self._warn_once(f"media {kind}", text)
        elif lacking:
            text = f"trackers {', '.join(lacking)} do not record {kind}: they are left out"
            self._warn_once(f"media {kind}", text)
        return len(lacking) < len(self._writers)

    def _take(
        self,
        kind: str,
        step: int | None,
        value: Any,
        convert: Callable[[Any], tuple[Any, ...]],
        kwargs: dict[str, Any],
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        copy: bool = True,
    ) -> None:
        """Copy what was given, and let the hub's thread convert it."""
        step = None if step is None else operator.index(step)
        if log_kwargs:
            self._check_keywords(log_kwargs, f"log_{kind}")
        if not self._wants(kind):
            return
        if isinstance(value, Mapping):
            kept: Any = {str(name): held(one) if copy else one for name, one in value.items()}
        else:
            kept = value
        extra = {name: dict(keywords) for name, keywords in (log_kwargs or {}).items()}

        size = size_of(kept)

        def converted() -> Media:
            return Media(kind, step, convert(kept), kwargs, kind != "artifact", extra, size)

        self._pump.put_media(Pending(size, converted))


def _converter(one: Callable[[Any], Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return what converts each value of a mapping."""
    return lambda kept: ({name: one(value) for name, value in kept.items()},)


@contextmanager
def _still(model: Any) -> Iterator[None]:
    """Have a module in eval mode, and each part of it as it was afterwards."""
    modules = list(model.modules()) if callable(getattr(model, "modules", None)) else []
    modes = [module.training for module in modules]
    if modules:
        model.eval()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
