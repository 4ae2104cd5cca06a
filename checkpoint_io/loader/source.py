"""One opened checkpoint as a source of tensors: the store, the manifest, and reads that explain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from checkpoint_io.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StateMismatchError,
    TornLoadError,
)
from checkpoint_io.format.manifest import Manifest, TensorEntry
from checkpoint_io.layout.dtypes import DTYPES
from checkpoint_io.loader.files import manifest_of
from checkpoint_io.loader.transfer import Transfer, Want
from checkpoint_io.pausing import collector_paused
from checkpoint_io.progress import TransferProgress
from checkpoint_io.reading.placing import check_target, dtype_of, flat_want, same_bytes, wants_for
from checkpoint_io.reading.sinks import Flat, flat_bytes
from checkpoint_io.sharding.dtensor import is_dtensor, local_of
from checkpoint_io.storage.open import Store


class Source:
    """What a view needs to read its tensor."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    def stored(self, key: str) -> str:
        """Return the key under which a tensor's bytes are stored (its own, unless it is tied)."""
        return self.manifest.aliases.get(key, key)

    def entry(self, key: str) -> TensorEntry:
        """Return what the manifest says of a tensor."""
        return self.manifest.tensors[self.stored(key)]

    def where(self, name: str) -> str:
        """Return the place of a file, for messages."""
        return f"{self.store.url}/{name}"

    def replaced(self) -> bool:
        """Say whether another save has replaced this checkpoint since it was opened."""
        try:
            return manifest_of(self.store).id != self.manifest.id
        except CheckpointError:
            return False

    def fill(
        self,
        pairs: Sequence[tuple[str, torch.Tensor]],
        *,
        fresh: Iterable[tuple[str, torch.Tensor]] = (),
        check: bool = True,
        progress: bool | None = False,
    ) -> None:
        """Read stored tensors into targets that the caller owns, and into fresh ones.

        The targets have been checked (`check_targets`); the fresh ones are from `new_tensors`.
        """
        with collector_paused():
            targets, memories = self._without_repeats(pairs)
            wants = [*self._wants(targets), *self._new_wants(fresh)]
            transfer = Transfer(self.store, self.manifest, wants, check)
        self._run(transfer, bool(pairs), progress, "loading")
        for memory in memories:
            if not memory.is_inference():
                # the bytes were written behind autograd's back
                torch.autograd.graph.increment_version(memory)

    def new_tensors(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return CPU tensors of the saved dtypes and shapes, not filled, by stored key."""
        tensors: dict[str, torch.Tensor] = {}
        aliases, entries = self.manifest.aliases, self.manifest.tensors
        for key in keys:
            stored = aliases.get(key, key)
            if stored not in tensors:
                dtype, shape, _ = entry = entries[stored]
                known = DTYPES.get(dtype) or dtype_of(entry, key)
                tensors[stored] = torch.empty(shape, dtype=known, device="cpu")
        return tensors

    def check_targets(self, pairs: Iterable[tuple[str, torch.Tensor]], cast: bool = False) -> None:
        """Refuse a target that does not fit what was saved, or cannot be written."""
        for key, target in pairs:
            check_target(self.entry(key), key, target, cast)

    def _wants(self, targets: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Want]:
        """Yield what to read for some targets."""
        tensors, aliases = self.manifest.tensors, self.manifest.aliases
        for key, target in targets:
            entry = tensors[aliases.get(key, key)]
            want = flat_want(entry, key, target)
            if want is not None:
                yield want
            else:
                yield from wants_for(entry, key, target, self.manifest.part_size)

    def _new_wants(self, targets: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Want]:
        """Do the same for tensors of `new_tensors`, which need no second look."""
        tensors = self.manifest.tensors
        for key, target in targets:
            entry = tensors[key]
            if len(entry.chunks) > 1:
                yield from wants_for(entry, key, target, self.manifest.part_size)
                continue
            file, _, _, begin, end, checksums = entry.chunks[0]
            if checksums:  # else it is empty
                yield Want(file, begin, end, checksums, key, Flat(flat_bytes(target)))

    def _without_repeats(
        self, pairs: Sequence[tuple[str, torch.Tensor]]
    ) -> tuple[list[tuple[str, torch.Tensor]], list[torch.Tensor]]:
        """Fill a tied target once; refuse one that two different saved tensors would fill.

        Returns what to fill, and the memory of each.
        """
        kept: dict[tuple[object, ...], tuple[str, torch.Tensor]] = {}
        memories = []
        for key, target in pairs:
            memory = local_of(target) if is_dtensor(target) else target
            if memory.numel() == 0:
                continue
            mark = (memory.device, memory.data_ptr(), memory.shape, memory.stride(), memory.dtype)
            if mark not in kept:
                kept[mark] = (key, target)
                memories.append(memory)
                continue
            first, _ = kept[mark]
            if self.stored(first) != self.stored(key) and not same_bytes(
                self.entry(first), self.entry(key)
            ):
                raise StateMismatchError(
                    f"{first} and {key} are one tensor in the targets (tied), but two different "
                    "ones were saved; nothing was changed: untie them, or load only one of them"
                )
        return list(kept.values()), memories

    def transfer(
        self,
        wants: Iterable[Want],
        *,
        progress: bool | None = False,
        label: str = "loading",
    ) -> None:
        """Read into memory that nobody uses yet, or only verify."""
        with collector_paused():
            transfer = Transfer(self.store, self.manifest, wants)
        self._run(transfer, False, progress, label)

    def _run(self, transfer: Transfer, live: bool, progress: bool | None, label: str) -> None:
        """Run a transfer; with `live`, its targets are the caller's and may be left half full."""
        try:
            with TransferProgress(label, transfer.nbytes, progress) as bar:
                transfer.run(bar)
        except Exception as error:
            if live and transfer.touched:
                raise TornLoadError(
                    f"loading {self.store.url} broke off after it had begun to write: the targets "
                    f"hold a mixture, load a good checkpoint into them before going on ({error})"
                ) from error
            if isinstance(error, CorruptCheckpointError) and self.replaced():
                raise CorruptCheckpointError(
                    f"{error}; a newer save has replaced this checkpoint meanwhile: open it again"
                ) from error
            raise
