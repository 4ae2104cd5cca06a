"""Commit a save on rank 0: the checkpoint exists once its manifest has been put in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from functools import cache
from importlib import metadata as importlib_metadata
from typing import Any

import torch

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    UnsettledWriteError,
)
from checkpoint_io.folder.removal import remove_all, remove_saves
from checkpoint_io.format.manifest import (
    ALGORITHM,
    FORMAT,
    PART_SIZE,
    VERSION,
    FileEntry,
    LazyManifest,
    Manifest,
    digest_of,
    same_manifest,
    seal,
)
from checkpoint_io.format.names import (
    MANIFEST,
    objects_name,
    save_id_of,
    stale_probes,
    temporary_name,
)
from checkpoint_io.format.parse import parse_document, parse_manifest
from checkpoint_io.group import Outcome
from checkpoint_io.loader.files import manifest_of, other_sizes
from checkpoint_io.storage.open import Store
from checkpoint_io.threads import collector_paused
from checkpoint_io.warning import warn

__all__ = ["Commit", "NextGeneration"]

#: The number that orders checkpoints, or what returns it for the manifest that is replaced; None
#: for one more than the number of that.
NextGeneration = Callable[["Manifest | None"], int] | int | None


class Commit:
    """Rank 0's part in one save.

    Attributes:
        lock: the lock of the folder, once the save has begun; released when its block ends.
    """

    def __init__(
        self,
        store: Store,
        save_id: str,
        run_id: str | None,
        metadata: Mapping[str, Any],
        before_write: Callable[[], None],
        spread: bool,
    ) -> None:
        self._store = store
        self._before_write = before_write
        self._spread = spread
        self._save_id = save_id
        self._run_id = run_id
        self._metadata = metadata
        self.lock = ExitStack()
        self._token = ""
        self._previous: Manifest | None = None
        self._leftovers: list[str] = []
        self._probes: list[str] = []
        self._data: bytes | None = None

    def begin(self) -> None:
        """Lock the folder and list its files, before the first byte is written."""
        self._before_write()
        # A local folder is locked (flock): a second save fails here, before it has written. Object
        # stores and some network filesystems have no lock; there the token alone detects another
        # save, when the manifest is replaced. It is taken before the manifest is read, so that a
        # change in between is a conflict and not overlooked.
        self.lock.enter_context(self._store.lock())
        self._token = self._store.token(MANIFEST)
        # Without a token there is none to read, and a new folder is not listed for its sake.
        self._previous = _current_manifest(self._store) if self._token else None
        named = {entry.name for entry in self._previous.files} if self._previous else set()
        # Leftovers are listed now, not when they are removed: a file that appears later may belong
        # to a save in progress, where there is no lock.
        if self._run_id is not None:
            present = self._store.sizes()
            self._leftovers = [name for name in present if save_id_of(name) and name not in named]
            self._probes = stale_probes(present)

    def publish(
        self, next_generation: NextGeneration, reports: Sequence[Mapping[str, Any]]
    ) -> Manifest:
        """Check that rank 0 sees the files of every rank, unless spread; replace the manifest."""
        generation = next_generation
        if callable(generation):
            generation = generation(self._previous)
        elif generation is None:
            generation = 1 + (self._previous.generation if self._previous else 0)
        with collector_paused():
            document = _assemble(self._save_id, generation, self._metadata, reports)
            data = seal(document)
            manifest = _manifest(document, data, self._store.url, reports)
        for index, _ in () if self._spread else other_sizes(self._store, manifest):
            # It happens where ranks save to local paths of different machines.
            entry = manifest.files[index]
            raise CheckpointError(
                f"rank 0 does not see {entry.name} of rank {entry.rank} whole in "
                f"{self._store.url}: save to a place that all ranks share"
            )
        self._before_write()  # again, as files may take long to write
        # From here on an error does not imply that nothing was committed: see `verdict`.
        self._data = data
        temporary = temporary_name(self._save_id)
        self._store.replace(MANIFEST, data, temporary, expected=self._token)
        self._check_not_replaced()
        return manifest

    def _check_not_replaced(self) -> None:
        """Raise if another save replaced the manifest, in a store that ignores conditions."""
        assert self._data is not None
        try:
            # a bit may flip on the way back: another save's manifest is so at a second look too
            ours = self._holds(self._data)
            if not ours:
                self._store.reconnect()
                ours = self._holds(self._data)
        except Exception as error:
            text = f"{self._store.url}: committed, but could not be read back ({error})"
            warn(text, CheckpointWarning)
            return
        if not ours:
            raise CheckpointConflictError(
                f"another save wrote to {self._store.url} at the same time, and its checkpoint is "
                "the current one: give each job a folder of its own"
            )

    def _holds(self, data: bytes) -> bool:
        """Return whether the manifest that is read back is this one."""
        self._store.forget(MANIFEST)
        with self._store.open(MANIFEST) as reader:
            return same_manifest(data, reader)

    def verdict(self, outcome: Outcome) -> dict[str, Any]:
        """Return whether the commit took place; after an error, by reading the manifest again.

        The state is "committed", "absent" or "unknown". An error does not decide it: a lost answer,
        or an interrupt at the wrong moment, may follow a commit that took place.
        """
        state = "committed"
        if outcome.error is not None and self._data is None:
            state = "absent"
        elif outcome.error is not None:
            current = Outcome.of(lambda: _current_manifest(self._store))
            current_id = current.value.id if isinstance(current.value, Manifest) else None
            # "absent" has the files removed, and a manifest that still arrives would name them.
            state = "unknown" if current.error or not self._is_settled(outcome.error) else "absent"
            state = "committed" if current_id == self._save_id else state
        plain = {**outcome.to_plain(), "value": None}
        return {"state": state, "manifest": self._data, "outcome": plain}

    def _is_settled(self, error: BaseException) -> bool:
        """Return whether a commit with this error can no longer take effect.

        A rename is done or not once the call returns; a request may be executed after it.
        """
        answered = isinstance(error, CheckpointError) and not isinstance(error, UnsettledWriteError)
        return self._store.can_rename or answered

    def clean_up(self, error: BaseException | None) -> None:
        """Remove the replaced checkpoint, and what killed saves of this run have left."""
        # A local rename is durable once its folder is synced. If that failed, the old manifest may
        # be back after a power cut, and needs its files.
        if error is not None and self._store.can_rename:
            text = (
                f"{self._store.url}: saved, but a power cut may undo it, so the older files are "
                f"kept; check the disk ({type(error).__name__}: {error})"
            )
            warn(text, CheckpointWarning)
            return
        if self._previous is not None:
            replaced = [entry.name for entry in self._previous.files]
            # a copy that its save could not remove; as that save was committed, it names no run
            copied = [name for name in self._leftovers if name == temporary_name(self._previous.id)]
            remove_all(self._store, [*replaced, *copied])
        if self._probes:
            remove_all(self._store, self._probes)
        if self._leftovers and self._run_id is not None:
            try:
                remove_saves(self._store, self._leftovers, self._run_id)
            except Exception as error:
                text = f"could not clean up {self._store.url}: {type(error).__name__}: {error}"
                warn(text, CheckpointWarning)

    def undo(self) -> None:
        """Remove every file of this save that rank 0 sees, including those of dead ranks."""
        with suppress(Exception):
            # Tensor files before objects files: these name the run, so that the next save of the
            # run can still remove what an interruption leaves.
            present = sorted(self._store.sizes(), reverse=True)
            ours = [name for name in present if save_id_of(name) == self._save_id]
            self._store.remove_many(ours)


def _assemble(
    save_id: str, generation: int, metadata: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Merge the reports of all ranks into the document of a manifest."""
    files: list[Any] = []
    tensors: dict[str, list[Any]] = {}
    aliases: dict[str, str] = {}
    for report in reports:
        base = len(files)
        files += report["files"]
        aliases.update(report["tied"])
        for key, dtype, shape, chunk in report["chunks"]:
            row = tensors.get(key)
            if row is None:
                row = tensors[key] = [dtype, list(shape)]  # as in the JSON that is parsed
            row.append((chunk[0] + base, *chunk[1:]) if base else chunk)
    created = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    present = {file["name"] for file in files}
    rank_objects = {str(rank): objects_name(save_id, rank) for rank in range(len(reports))}
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": save_id,
        "generation": generation,
        "created": created.replace("+00:00", "Z"),
        "writer": {"checkpoint_io": _own_version(), "torch": str(torch.__version__)},
        "world_size": len(reports),
        "metadata": metadata,
        "checksum": {"algorithm": ALGORITHM, "part_size": PART_SIZE},
        "files": files,
        "aliases": aliases,
        "objects": {
            "shared": objects_name(save_id, None),
            "ranks": {rank: name for rank, name in rank_objects.items() if name in present},
        },
        "tensors": tensors,
    }


def _manifest(
    document: dict[str, Any], data: bytes, url: str, reports: Sequence[Mapping[str, Any]]
) -> Manifest:
    """Return the manifest of a document; parse it where ranks may contradict each other."""
    parts = any(len(chunk) > 4 for report in reports for *_, chunk in report["chunks"])
    if parts or len(reports) > 1:
        # Never commit what readers refuse: the old checkpoint is removed afterwards.
        return parse_document(document, data, url)
    # One rank that writes whole tensors leaves no gap and no overlap, and `layout` has refused
    # those that readers do.
    files = tuple(
        FileEntry(**{**file, "checksums": tuple(file["checksums"])}) for file in document["files"]
    )
    known = {
        "id": document["id"],
        "generation": document["generation"],
        "created": document["created"],
        "world_size": 1,
        "files": files,
        "digest": digest_of(data),
    }
    return LazyManifest(known, lambda: parse_manifest(data, f"{url}/{MANIFEST}"))


@cache
def _own_version() -> str:
    """Return the version of the installed distribution; found once, as it takes a millisecond."""
    try:
        return importlib_metadata.version("accel-callbacks")
    except importlib_metadata.PackageNotFoundError:
        return "unknown"


def _current_manifest(store: Store) -> Manifest | None:
    """Return the manifest in the folder; None if there is none, or a corrupt one."""
    try:
        return manifest_of(store, tensors=False)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return None
