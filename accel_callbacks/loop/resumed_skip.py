"""Batches that a script skips after a resume, although its loader has skipped them already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.loop.loop import Loop
from accel_callbacks.warning import warn

__all__ = ["checked_for_skips"]

_SKIPPED = (
    "the first {} batches after load_state were not trained on, and are lost: the prepared loader "
    "had gone on after the {} that were done before. Leave out the script's own skip (`if step < "
    "...: continue`) and count with enumerate(loader, start=...), or iterate "
    "accel.skip_first_batches(loader, step), which counts from the start of the epoch."
)


def checked_for_skips(loader: DataLoaderShard, loop: Loop, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the rest of a resumed epoch; warn if as many batches are idle as were done before.

    A batch is idle if no prepared model was called and nothing went backward. A single one is no
    sign of a skip, which any loop may do.

    Args:
        loader: begins a pass in the middle of an epoch.
        loop: has the prepared models.
        batches: of the loader.
    """
    done = idle = 0
    called: list[Any] = []
    # A hook would be compiled into a model that was compiled in place.
    handles = [
        model.register_forward_pre_hook(lambda *_: called.append(True))
        for model in loop.models
        if getattr(model, "_compiled_call_impl", None) is None
    ]
    try:
        for batch in batches:
            done = done or loader.batch_index
            yield batch
            if called or loop.window.touched or loop.window.position:
                break
            idle += 1
        ended = not called and loader.finished
        lost = idle > 1 and (idle == done or (ended and idle < done))
        if handles and lost:
            warn(_SKIPPED.format(idle, done))
    finally:
        for handle in handles:
            handle.remove()
    yield from batches
