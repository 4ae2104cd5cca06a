"""Copies of the Trainer's checkpoints in an object store, and back where the disk is a new one."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from accel_callbacks.checkpoint.project import path_in
from accel_callbacks.local_files import base_name, replace, sync_file, sync_folder
from accel_callbacks.logging import notice
from accel_callbacks.warning import warn
from checkpoint_io import (
    CheckpointConflictError,
    CheckpointFolder,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    keep_last,
)
from checkpoint_io.folder.sealed import check_seal
from checkpoint_io.storage.local import folder_lock

__all__ = ["VARIABLE", "Mirror", "mirror_of"]

#: A folder or fsspec URL; below it each ``output_dir`` has a folder of its name.
VARIABLE = "ACCEL_MIRROR_CHECKPOINTS"
_RUN = {"run_id": "trainer"}
_FETCHING = "_accel_fetching"
_PAUSE = 0.1  # seconds between two looks at whether another rank has fetched


def mirror_of(output_dir: str | os.PathLike[str]) -> Mirror | None:
    """Return the mirror of a folder, None where nobody has asked for one."""
    url = os.environ.get(VARIABLE)
    return _mirror(path_in(url, base_name(os.path.abspath(output_dir)))) if url else None


class Mirror:
    """A folder of checkpoints that hold the files of the Trainer's, as tensors of bytes.

    So an upload is committed by its manifest, and what is fetched is verified.

    Args:
        url: of the folder.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._folder = CheckpointFolder(url, on_warning=notice)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._upload: Future[None] | None = None

    def put(self, path: str, step: int, limit: int | None, best: int | None) -> None:
        """Copy a checkpoint on a thread, once the copy of the one before has ended.

        Args:
            path: its local folder, which may be removed meanwhile.
            step: its step.
            limit: how many copies to keep, None for all.
            best: the step of one to keep in any case.
        """
        self.wait()
        files = {}
        for below, _, names in os.walk(path):
            for name in names:
                file = os.path.join(below, name)
                files[os.path.relpath(file, path).replace(os.sep, "/")] = _mapped(file)
        self._upload = self._thread.submit(self._save, files, step, limit, best)

    def _save(
        self, files: dict[str, torch.Tensor], step: int, limit: int | None, best: int | None
    ) -> None:
        self._folder.save(step, {"files": files}, metadata=_RUN, progress=False)
        if limit:
            protect = [] if best is None else [self._folder.path(best)]
            self._folder.prune(
                keep_last(limit), run_id=_RUN["run_id"], protect=protect, missing_ok=True
            )

    def wait(self) -> None:
        """Wait until a copy is durable; warn if it has failed, and training goes on."""
        upload, self._upload = self._upload, None
        if upload is None:
            return
        try:
            upload.result()
        except Exception as error:
            warn(
                f"{self.url} lacks a checkpoint: {type(error).__name__}: {error}. The next one is "
                f"copied again; check {VARIABLE} and what it gives access to."
            )

    def fetch(self, output_dir: str | os.PathLike[str], newest: int | None) -> None:
        """Copy the newest whole checkpoint to the disk, unless it has one that is as new.

        Processes that share the disk take turns, and the first one does it.

        Args:
            output_dir: of the Trainer.
            newest: the step of the newest whole checkpoint in it.
        """
        info = self._folder.latest()
        if info is None or (newest is not None and newest >= _step(info.manifest.metadata)):
            return
        place = os.fspath(output_dir)
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
            target = os.path.join(place, f"checkpoint-{step}")
            if (newest is not None and step <= newest) or _is_whole(target):
                return
            staged = os.path.join(fetching, base_name(target))
            shutil.rmtree(staged, ignore_errors=True)
            try:
                for name, view in reader.state["files"].items():
                    _write(staged, name, view.read())
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


def _is_whole(path: str) -> bool:
    try:
        check_seal(path, full=False)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return False
    return True


def _mapped(path: str) -> torch.Tensor:
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
