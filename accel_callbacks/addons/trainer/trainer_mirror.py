"""Copies of the Trainer's checkpoints in an object store, and back where the disk is a new one.

Scripts and packages write into ``output_dir`` by ``os``, and open what they find there. So one that
is a URL is a folder of the disk with a mirror at that URL, and its path tells which.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from accel_callbacks.addons.trainer.trainer_folder import PREFIX, newest_whole, problem_of, step_of
from accel_callbacks.callbacks.checkpoint import Keep
from accel_callbacks.checkpoint.project import path_in
from accel_callbacks.logging import notice
from checkpoint_io import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFolder,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from checkpoint_io.folder.sealed import SEAL, check_seal
from checkpoint_io.local_files import base_name, replace, sync_file, sync_folder
from checkpoint_io.storage.base import is_child_name
from checkpoint_io.storage.local import folder_lock
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.warning import warn

__all__ = ["VARIABLE", "Mirror", "folder_of", "mirror_of"]

#: A folder or fsspec URL; below it each ``output_dir`` has a folder of its name.
VARIABLE = "ACCEL_MIRROR_CHECKPOINTS"
#: Where an ``output_dir`` that is a URL is on the disk, in the current folder.
_REMOTE = "accel_remote"
_RUN = {"run_id": "trainer"}
_FETCHING = "_accel_fetching"
_NOT_FILES = (PREFIX, "_accel")  # folders that are copied as checkpoints, or being written
_PAUSE = 0.1  # seconds between two looks at whether another rank has fetched


def mirror_of(output_dir: str | os.PathLike[str]) -> Mirror | None:
    """Return the mirror of a folder, None where nobody has asked for one."""
    path = os.path.abspath(output_dir)
    _, remote, place = path.rpartition(f"{os.sep}{_REMOTE}{os.sep}")
    if remote:
        protocol, _, rest = place.replace(os.sep, "/").partition("/")
        return _mirror(f"{protocol}://{rest}")
    url = os.environ.get(VARIABLE)
    return _mirror(path_in(url, base_name(path))) if url else None


def folder_of(url: str) -> str:
    """Return the path below the current folder for an ``output_dir`` that is a URL.

    Raises:
        ValueError: the URL names no folder, or leads out of it.
    """
    protocol, _, rest = url.partition("://")
    names = rest.strip("/").split("/")
    if not all(is_child_name(name) for name in names):
        raise ValueError(f"output_dir={url!r} names no folder: give one such as s3://bucket/run.")
    return os.path.join(_REMOTE, protocol, *names)


class Mirror:
    """A folder of checkpoints that hold the files of the Trainer's, as tensors of bytes.

    So an upload is committed by its manifest, and what is fetched is verified.

    Args:
        url: of the folder.
        storage_options: for the filesystem behind the URL.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self._options = storage_options
        self._folder = CheckpointFolder(url, storage_options=storage_options, on_warning=notice)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._upload: Future[None] | None = None
        self._copied: dict[str, tuple[int, int]] = {}

    def put(self, path: str, step: int, keep: Keep | None, best: int | None) -> None:
        """Copy a checkpoint on a thread; the copy of the one before has to be waited for.

        Args:
            path: its local folder, which may be removed meanwhile.
            step: its step.
            keep: a policy for the copies, None to keep all.
            best: the step of one to keep in any case.
        """
        files = {}
        for below, _, names in os.walk(path):
            for name in names:
                file = os.path.join(below, name)
                files[os.path.relpath(file, path).replace(os.sep, "/")] = _map_file(file)
        self._upload = self._thread.submit(self._save, files, step, keep, best)

    def _save(
        self, files: dict[str, torch.Tensor], step: int, keep: Keep | None, best: int | None
    ) -> None:
        self._folder.save(step, {"files": files}, metadata=_RUN, progress=False)
        if keep is not None:
            protect = [] if best is None else [self._folder.path(best)]
            self._folder.prune(keep, run_id=_RUN["run_id"], protect=protect, missing_ok=True)

    def wait(self) -> None:
        """Wait until a copy is durable; raise its error if it has failed."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    def wait_and_warn(self) -> None:
        """Wait until a copy is durable; warn if it has failed, and training goes on."""
        try:
            self.wait()
        except Exception as error:
            warn(
                f"{self.url} lacks a checkpoint: {type(error).__name__}: {error}. The next one is "
                "copied again; check the URL, and what gives access to it."
            )

    def put_files(self, output_dir: str | os.PathLike[str]) -> None:
        """Copy what is new of the files beside the checkpoints, such as the last model, as files.

        Warns about one that cannot be copied; it is copied again by the next call.

        Args:
            output_dir: of the Trainer.
        """
        store = open_store(self.url, self._options)
        for folder, names, files in os.walk(output_dir):
            names[:] = [n for n in names if not n.startswith(_NOT_FILES) and is_child_name(n)]
            below = os.path.relpath(folder, output_dir)
            target = store
            for name in [] if below == "." else below.split(os.sep):
                target = target.child(name)
            for name in files:
                self._put_file(target, os.path.join(folder, name))

    def _put_file(self, target: Store, path: str) -> None:
        name = base_name(path)
        try:
            status = os.stat(path)
            version = (status.st_mtime_ns, status.st_size)
            if self._copied.get(path) == version:
                return
            with target.create(name, status.st_size) as write:
                write(_map_file(path).numpy().data)
        except (CheckpointError, OSError) as error:
            warn(f"{target.url} lacks {name}: {error}. It is still at {path}.")
        else:
            self._copied[path] = version

    def fetch(self, output_dir: str | os.PathLike[str]) -> None:
        """Copy the newest whole checkpoint to the disk, unless it has one that is as new.

        Processes that share the disk take turns, and the first one does it.

        Args:
            output_dir: of the Trainer.
        """
        place = os.fspath(output_dir)
        newest = step_of(newest_whole(place)) if os.path.isdir(place) else None
        info = self._folder.latest()
        if info is None or (newest is not None and newest >= _step(info.manifest.metadata)):
            return
        fetching = os.path.join(place, _FETCHING)
        while True:
            try:
                with folder_lock(fetching):
                    self._fetch(place, fetching, newest)
                    shutil.rmtree(fetching, ignore_errors=True)
                return
            except CheckpointConflictError:
                time.sleep(_PAUSE)

    def _fetch(self, place: str, fetching: str, newest: int | None) -> None:
        damaged: list[str] = []
        while True:
            try:
                reader = self._folder.open_latest(skip=damaged)
            except (CheckpointNotFoundError, CorruptCheckpointError):
                return
            step = _step(reader.manifest.metadata)
            target = os.path.join(place, f"{PREFIX}{step}")
            if (newest is not None and step <= newest) or problem_of(target) is None:
                return
            staged = os.path.join(fetching, base_name(target))
            shutil.rmtree(staged, ignore_errors=True)
            try:
                for name, view in reader.state["files"].items():
                    _write(staged, name, view.read())
                if os.path.exists(os.path.join(staged, SEAL)):  # the manifest has vouched for it
                    check_seal(staged)
            except CorruptCheckpointError as error:
                notice(f"a copy in {self.url} is passed over: {error}")
                damaged.append(reader.path)
                continue
            shutil.rmtree(target, ignore_errors=True)  # half of one, by another program
            replace(staged, target)
            sync_folder(place)
            notice(f"{base_name(target)} is fetched from {self.url}")
            return


_mirror = cache(Mirror)


def _step(metadata: Any) -> int:
    return int(metadata["step"])


def _map_file(path: str) -> torch.Tensor:
    """Return the bytes of a file, which the system reads when they are used."""
    size = os.path.getsize(path)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)


def _write(folder: str, name: str, content: torch.Tensor) -> None:
    path = os.path.abspath(os.path.join(folder, name))
    if not path.startswith(os.path.abspath(folder) + os.sep):
        raise CorruptCheckpointError(f"{name!r} is no name of a file in a checkpoint")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content.numpy().data)
        file.flush()
        sync_file(file.fileno())
