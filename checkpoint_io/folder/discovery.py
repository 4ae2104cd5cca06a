"""What is in a folder of checkpoints: valid, unfinished, broken or foreign, and why."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

from checkpoint_io.errors import CheckpointError, CheckpointNotFoundError
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.names import MANIFEST, save_id_of
from checkpoint_io.loader.files import check_sizes, manifest_of
from checkpoint_io.storage.open import Store

__all__ = ["CheckpointInfo", "FolderEntry"]

_AT_ONCE = 8
_CACHED_TENSORS = 200_000
_OF_THE_DISK = "lost+found"  # at the root of ext filesystems; only root may look into it
_HEAD_BYTES = 4096
_GENERATION = re.compile(rb'"generation":([0-9]{1,15}),')
_ID = re.compile(rb'"id":"([0-9a-f]{8,64})"')

T = TypeVar("T")
Status = Literal["valid", "unfinished", "broken", "foreign"]


@dataclass(frozen=True)
class CheckpointInfo:
    """A valid checkpoint found in a folder.

    Attributes:
        path: its URL, as `load` takes it.
        name: its folder's name.
        manifest: its manifest.

    Example:
        >>> from checkpoint_io import CheckpointFolder
        >>> folder = CheckpointFolder("memory://doc-folder/info")
        >>> _ = folder.save(200, {"lr": 0.1})
        >>> folder.list()[0].name
        'step-00000200'
    """

    path: str
    name: str
    manifest: Manifest


@dataclass(frozen=True)
class FolderEntry:
    """One folder inside a folder of checkpoints, and what it is.

    Attributes:
        path: its URL.
        name: its name.
        status: "valid" (whole by manifest and sizes), "unfinished" (files of a save that never
            committed), "broken" (a manifest that cannot be used, or files that do not fit it) or
            "foreign" (nothing of ours).
        reason: why it is not valid; "" if it is.
        manifest: its manifest where that one is sound, else None.

    Example:
        >>> from checkpoint_io import CheckpointFolder
        >>> folder = CheckpointFolder("memory://doc-folder/entry")
        >>> _ = folder.save(1, {"lr": 0.1})
        >>> [(entry.name, entry.status) for entry in folder.survey()]
        [('step-00000001', 'valid')]
    """

    path: str
    name: str
    status: Status
    reason: str
    manifest: Manifest | None

    @property
    def info(self) -> CheckpointInfo:
        """The same as a `CheckpointInfo`; for a valid entry."""
        if self.status != "valid" or self.manifest is None:
            raise ValueError(f"{self.name} is {self.status}: {self.reason}")
        return CheckpointInfo(self.path, self.name, self.manifest)


def age_order(info: CheckpointInfo) -> tuple[int, str]:
    """Return the key that sorts checkpoints, oldest first."""
    return info.manifest.generation, info.manifest.created


def id_of(store: Store) -> str | None:
    """Return the id of the checkpoint in a folder from the head of its manifest, None for none."""
    try:
        found = _ID.search(_head(store))
        return found[1].decode("ascii") if found else manifest_of(store).id
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return None


def _head(store: Store) -> bytes:
    """Read the first bytes of a manifest, which hold its id and generation but not its tensors."""
    with store.open(MANIFEST) as reader:
        return bytes(reader.read(0, min(reader.size, _HEAD_BYTES)))


class Scanner:
    """Looks through the folders of one store; a manifest that did not change is read once."""

    def __init__(self, store: Store, path_of: Callable[[str], str]) -> None:
        self._store = store
        self._path_of = path_of
        self._known: dict[str, tuple[str, Manifest]] = {}
        self._guard = threading.Lock()

    def survey(self) -> list[FolderEntry]:
        """Look at every folder; sorted by name."""
        return self._each(self._look, self._folders())

    def highest_generation(self) -> int:
        """Return the highest generation in the folder, 0 where there is none."""
        return max(self._each(self._generation, self._folders()), default=0)

    def _folders(self) -> list[str]:
        """List the folders that may be checkpoints."""
        return [name for name in self._store.folders() if name != _OF_THE_DISK]

    def _each(self, look: Callable[[str], T], names: Sequence[str]) -> list[T]:
        """Apply to each name; several at a time where each costs a round trip."""
        if self._store.can_rename or len(names) < 2:
            return [look(name) for name in names]
        with ThreadPoolExecutor(min(_AT_ONCE, len(names)), "checkpoint-scan") as pool:
            return list(pool.map(look, names))

    def _look(self, name: str) -> FolderEntry:
        """Find out what one folder is."""
        store, manifest = self._store.child(name), None
        status: Status = "valid"
        reason = ""
        try:
            manifest = self._manifest(name, store)
            check_sizes(store, manifest)
        except CheckpointNotFoundError as error:
            reason = str(error)
            ours = any(save_id_of(file) for file in store.sizes())
            status = "unfinished" if ours else "foreign"
        except CheckpointError as error:
            status, reason = "broken", str(error)
        return FolderEntry(self._path_of(name), name, status, reason, manifest)

    def _manifest(self, name: str, store: Store) -> Manifest:
        """Read a manifest, or take the one that was read from the same version of the file."""
        token = store.token(MANIFEST)  # before the read: a change in between is read again
        with self._guard:
            known = self._known.get(name)
        if known is not None and token and known[0] == token:
            return known[1]
        manifest = manifest_of(store)
        with self._guard:
            self._known.pop(name, None)
            self._known[name] = (token, manifest)
            while sum(len(m.tensors) for _, m in self._known.values()) > _CACHED_TENSORS:
                del self._known[next(iter(self._known))]
        return manifest

    def _generation(self, name: str) -> int:
        """Return the generation of one checkpoint from the head of its manifest, 0 for no such."""
        store = self._store.child(name)
        try:
            found = _GENERATION.search(_head(store))
            return int(found[1]) if found else self._manifest(name, store).generation
        except (CheckpointError, FileNotFoundError, NotADirectoryError):
            return 0
