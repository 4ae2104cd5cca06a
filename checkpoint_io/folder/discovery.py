"""Scan a folder of checkpoints: which ones are valid, unfinished, broken or foreign, and why."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from checkpoint_io.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from checkpoint_io.format.manifest import Manifest, TensorEntry
from checkpoint_io.format.names import MANIFEST, save_id_of
from checkpoint_io.loader.files import check_sizes, manifest_of, retry_if_replaced
from checkpoint_io.storage.local import local_folder
from checkpoint_io.storage.open import Store
from checkpoint_io.threads import mapped

__all__ = ["CheckpointInfo", "FolderEntry"]

_AT_ONCE = 8
_CACHED_ENTRIES = 200_000  # of files, and of chunks of tensors: each takes about 1 kB
_LOST_AND_FOUND = "lost+found"  # at the root of ext filesystems; only root may list it
_HEAD_BYTES = 4096  # enough of a manifest for its id and age, without the tensors
_GENERATION = re.compile(rb'"generation":([0-9]{1,15}),')
_ID = re.compile(rb'"id":"([0-9a-f]{8,64})"')
# in the order of fields in which they are written: at any other place they may be of something else
_AGE = re.compile(
    rb'\{"digest":"[0-9a-f]{64}","format":"[a-z-]+","version":[0-9]+,"id":"[0-9a-f]{8,64}",'
    rb'"generation":([0-9]{1,15}),"created":"([ -!#-\[\]-~]*)"'
)

T = TypeVar("T")
Age = tuple[int, str]  # generation and time, which sort checkpoints
Status = Literal["valid", "unfinished", "broken", "foreign"]


@dataclass(frozen=True)
class CheckpointInfo:
    """A valid checkpoint found in a folder.

    Attributes:
        path: its URL, to be passed to `load`.
        name: its folder's name.
        manifest: its manifest; the entries of its tensors are read when they are asked for.

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
    """One folder inside a folder of checkpoints, and its status.

    Attributes:
        path: its URL.
        name: its name.
        status: "valid" (complete by manifest and sizes), "unfinished" (files of a save that never
            committed), "broken" (an unusable manifest, or files that do not match it) or "foreign"
            (no file of this package).
        reason: why it is not valid; "" if it is.
        manifest: its manifest if that is intact, else None; the entries of its tensors are read
            when they are asked for.

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
        """This entry as a `CheckpointInfo`; ValueError if it is not valid."""
        if self.status != "valid" or self.manifest is None:
            raise ValueError(f"{self.name} is {self.status}: {self.reason}")
        return CheckpointInfo(self.path, self.name, self.manifest)


def age_order(info: CheckpointInfo) -> Age:
    """Return the key that sorts checkpoints, oldest first."""
    return _age_of(info.manifest)


def _age_of(manifest: Manifest) -> Age:
    """Return the age that a manifest says."""
    return manifest.generation, manifest.created


def id_of(store: Store) -> str | None:
    """Return the id of the checkpoint in a folder, None if there is no readable one."""
    try:
        match = _ID.search(_head(store))
        return match[1].decode("ascii") if match else manifest_of(store, tensors=False).id
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return None


def _head(store: Store) -> bytes:
    """Read the head of a manifest, which has its id and age."""
    with store.open(MANIFEST) as reader:
        return bytes(reader.read(0, min(reader.size, _HEAD_BYTES)))


class Scanner:
    """Scans the folders of one store; caches manifests, and their ages, until they change."""

    def __init__(self, store: Store, path_of: Callable[[str], str]) -> None:
        self._store = store
        self._path_of = path_of
        self._cache: dict[str, tuple[str, Manifest]] = {}  # name: token and manifest
        self._ages: dict[str, tuple[str, Age]] = {}  # name: token and age
        self._guard = threading.Lock()

    def survey(self) -> list[FolderEntry]:
        """Return an entry for every folder, sorted by name."""
        names = [name for name in self._store.folders() if name != _LOST_AND_FOUND]
        with self._guard:
            for gone in self._cache.keys() - set(names):
                del self._cache[gone]
        entries = self._each(self._entry, names)
        self._trim()
        return entries

    def highest_generation(self) -> int:
        """Return the highest generation in the folder, 0 where there is none."""
        ages = self._all_ages().values()
        return max((age[0] for age in ages if age is not None), default=0)

    def newest(self, report: Callable[[FolderEntry], None]) -> FolderEntry | None:
        """Return the newest valid entry; report each that may be newer and is not valid."""
        ages = self._all_ages()
        # what has no age may be anything, also the newest
        unknown = [name for name, age in ages.items() if age is None]
        dated = [(age, name) for name, age in ages.items() if age is not None]
        for entry in self._each(self._entry, unknown):
            report(entry)
        for _, name in sorted(dated, reverse=True):
            entry = self._entry(name)
            if entry.status == "valid":
                return entry
            report(entry)
        return None

    def _all_ages(self) -> dict[str, Age | None]:
        """Return the age of each folder, None without a manifest; one listing reads the changed."""
        tokens = self._store.versions(MANIFEST)
        tokens.pop(_LOST_AND_FOUND, None)
        with self._guard:
            for gone in self._ages.keys() - tokens.keys():
                del self._ages[gone]
            known = {
                name: age for name, (token, age) in self._ages.items() if token == tokens[name]
            }
        changed = [name for name in tokens if name not in known]
        looked_up = dict(zip(changed, self._each(self._age, changed), strict=True))
        with self._guard:
            for name, age in looked_up.items():
                if age is not None and tokens[name]:
                    self._ages[name] = tokens[name], age
        return {name: known[name] if name in known else looked_up[name] for name in tokens}

    def _each(self, action: Callable[[str], T], names: Sequence[str]) -> list[T]:
        """Apply an action to each name, concurrently where each call is a round trip."""
        return mapped(action, names, 1 if local_folder(self._store) is not None else _AT_ONCE)

    def _entry(self, name: str) -> FolderEntry:
        """Return the entry of one folder."""
        store = self._store.child(name)
        manifest: Manifest | None = None
        status: Status = "valid"
        reason = ""

        def check(found: Manifest) -> None:
            nonlocal manifest
            manifest = found
            check_sizes(store, found)

        try:
            # A save that replaces this checkpoint removes the files of the manifest just read: as
            # "broken" it would send a reader back to an older one.
            retry_if_replaced(store, check, lambda: self._manifest(name, store))
        except CheckpointNotFoundError as error:
            manifest, reason = None, str(error)
            ours = any(save_id_of(file) for file in store.sizes())
            status = "unfinished" if ours else "foreign"
        except CheckpointError as error:
            status, reason = "broken", str(error)
        return FolderEntry(self._path_of(name), name, status, reason, manifest)

    def _manifest(self, name: str, store: Store) -> Manifest:
        """Return a manifest, from the cache if the file has not changed."""
        token = store.token(MANIFEST)  # before the read: after a change in between, read again
        with self._guard:
            cached = self._cache.get(name)
        if cached is not None and token and cached[0] == token:
            return cached[1]
        manifest = manifest_of(store, tensors=False)
        with self._guard:
            self._cache.pop(name, None)
            self._cache[name] = (token, manifest)
        return manifest

    def _trim(self) -> None:
        """Forget the oldest manifests, as long as all together take too much memory."""
        with self._guard:
            sizes = {}  # entries of files, and of chunks where they have been parsed
            for name, (_, manifest) in self._cache.items():
                tensors: Mapping[str, TensorEntry] = vars(manifest).get("tensors", {})
                chunks = sum(len(tensor.chunks) for tensor in tensors.values())
                sizes[name] = len(manifest.files) + chunks
            total = sum(sizes.values())
            for name, size in sizes.items():
                if total <= _CACHED_ENTRIES:
                    return
                del self._cache[name]
                total -= size

    def _age(self, name: str) -> Age | None:
        """Return the age of one checkpoint; of a damaged one what it still says, else None."""
        store = self._store.child(name)
        try:
            head = _head(store)
            if match := _AGE.match(head):
                return int(match[1]), match[2].decode("ascii")
            try:
                return _age_of(self._manifest(name, store))
            except CorruptCheckpointError:
                match = _GENERATION.search(head)
                return (int(match[1]), "") if match else None
        except (CheckpointError, FileNotFoundError, NotADirectoryError):
            return None
