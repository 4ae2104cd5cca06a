"""The read engine: wanted parts in few spans, each part verified in its buffer, then handed on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.loader.files import naming
from checkpoint_io.progress import TransferProgress
from checkpoint_io.reading.sinks import Bytes, Sink
from checkpoint_io.storage.open import Store
from checkpoint_io.stores.spans import Span

GAP_BYTES = 64 << 10


class Want(NamedTuple):
    """Bytes of a file that have checksums of their own: a chunk, or what a file entry covers.

    `label` is the tensor's key ("" for a head). Without a sink the bytes are only verified. `parts`
    numbers the parts that are needed; None means all.
    """

    file: int
    begin: int
    end: int
    checksums: Sequence[str]
    label: str
    sink: Sink | None = None
    parts: Iterable[int] | None = None


class _Part(NamedTuple):
    """One checksummed piece of a file, and who takes it."""

    begin: int
    end: int
    checksum: str
    label: str
    offset: int
    sinks: list[Sink]


class Transfer:
    """Reads what is wanted from one checkpoint, once each, verified before it is handed on.

    Attributes:
        nbytes: how many bytes will be read.
        touched: whether a sink has been given bytes yet.
    """

    def __init__(
        self, store: Store, manifest: Manifest, wants: Iterable[Want], check: bool = True
    ) -> None:
        self._store, self._manifest, self._check = store, manifest, check
        self._spans: list[Span] = []
        self._contents: list[list[_Part]] = []
        for file, parts in sorted(self._collect(wants).items()):
            self._form_spans(manifest.files[file].name, [parts[at] for at in sorted(parts)])
        self.nbytes = sum(span.end - span.begin for span in self._spans)
        self.touched = False
        self._waiting = bytearray(b"\1") * len(self._spans)
        self._guard = threading.Lock()
        self._progress: TransferProgress | None = None

    def _collect(self, wants: Iterable[Want]) -> dict[int, dict[int, _Part]]:
        """List the parts by file and first byte; those that several want are listed once."""
        size = self._manifest.part_size
        files: dict[int, dict[int, _Part]] = {}
        for file, begin, end, checksums, label, sink, numbers in wants:
            parts = files.setdefault(file, {})
            if numbers is None and len(checksums) == 1 and begin not in parts:
                taken = [] if sink is None else [sink]
                parts[begin] = _Part(begin, end, checksums[0], label, 0, taken)
                continue
            for number in range(len(checksums)) if numbers is None else numbers:
                offset = number * size
                at = begin + offset
                part = parts.get(at)
                if part is None:
                    stop = at + size
                    part = _Part(
                        at, stop if stop < end else end, checksums[number], label, offset, []
                    )
                    parts[at] = part
                if sink is not None:
                    part.sinks.append(sink)
        return files

    def _form_spans(self, name: str, parts: list[_Part]) -> None:
        """Join parts of a file that are close to each other."""
        contents: list[_Part] = []
        for part in parts:
            full = contents and part.end - contents[0].begin > self._store.span_bytes
            if contents and (full or part.begin - contents[-1].end > GAP_BYTES):
                self._add_span(name, contents)
                contents = []
            contents.append(part)
        if contents:
            self._add_span(name, contents)

    def _add_span(self, name: str, contents: list[_Part]) -> None:
        self._spans.append(Span(name, contents[0].begin, contents[-1].end))
        self._contents.append(contents)

    def run(self, progress: TransferProgress | None = None) -> None:
        """Read all; raises the first error, after which some sinks may have been given bytes."""
        if not self._spans:
            return
        self._progress = progress
        try:
            self._store.fetch(self._spans, self._deliver)
        except _DamageError:
            raise
        except CorruptCheckpointError as error:
            raise self._with_labels(error) from error
        if any(self._waiting):
            missed = self._spans[self._waiting.index(1)]
            raise CheckpointError(
                f"{self._store.url}/{missed.name}: bytes {missed.begin} to {missed.end} were never "
                "delivered by the store; load again"
            )

    def _deliver(self, index: int, data: memoryview[int]) -> None:
        """Verify and hand on the parts of one span."""
        span = self._spans[index]
        if len(data) != span.end - span.begin:
            raise CorruptCheckpointError(
                f"{self._store.url}/{span.name}: {len(data)} bytes came for {span.begin} "
                f"to {span.end}"
            )
        with self._guard:
            if not self._waiting[index]:
                raise CheckpointError(f"{self._store.url}/{span.name}: a span was delivered twice")
            self._waiting[index] = 0
        source: Bytes = np.frombuffer(data, dtype=np.uint8)
        base, check, digest = span.begin, self._check, xxhash.xxh3_64_hexdigest
        for part in self._contents[index]:
            piece = source[part.begin - base : part.end - base]
            if check and digest(piece) != part.checksum:  # type: ignore[arg-type]
                raise self._damage(span.name, part)
            for sink in part.sinks:
                self.touched = True
                sink.take(part.offset, piece)
        if self._progress is not None:
            self._progress.add(len(data))

    def _damage(self, name: str, part: _Part) -> CorruptCheckpointError:
        """Say which bytes are wrong and whose they are."""
        owner = f", in tensor {part.label}" if part.label else ""
        return _DamageError(
            f"{self._store.url}/{name}: bytes {part.begin} to {part.end} are not the ones saved "
            f"(checksum differs){owner}; copy the file again or load an older checkpoint"
        )

    def _with_labels(self, error: CorruptCheckpointError) -> CorruptCheckpointError:
        """Add the tensors of the file that an error of the store names."""
        labels = [
            part.label
            for span, contents in zip(self._spans, self._contents, strict=True)
            if span.name in str(error)
            for part in contents
        ]
        return CorruptCheckpointError(f"{error}{naming(labels)}")


class _DamageError(CorruptCheckpointError):
    """A checksum that differs; its message names the tensor."""
