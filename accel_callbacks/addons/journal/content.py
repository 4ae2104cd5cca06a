"""A digest of what a batch holds, to tell data that have changed under the same indices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

__all__ = ["content_digest"]


def content_digest(batch: Any) -> str | None:
    """Return a digest of the tensors, arrays, texts and numbers of a batch.

    None if the batch has none on the host: nothing is read from a device, which would wait for it.
    """
    digest, empty = xxhash.xxh3_64(), True
    for content in _contents(batch):
        digest.update(content)
        empty = False
    return None if empty else digest.hexdigest()


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _contents(part)
    elif isinstance(value, torch.Tensor):
        if value.is_cpu and value.layout == torch.strided and not value.is_quantized:
            yield value.detach().flatten().view(torch.uint8).numpy()
    elif isinstance(value, (str, bytes, bool, int, float)):
        yield repr(value).encode()
    elif callable(getattr(value, "tobytes", None)):  # an array, an image
        yield value.tobytes()
