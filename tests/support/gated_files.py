"""A store on this machine's disk whose writes wait while a gate is shut, and fail when told to.

`gated://<path>` with the storage option `gate`, a path: while that file exists, nothing is
written; while `<gate>.fails` exists, writing raises. So several processes see one gate, a test
decides when a save goes on, and no test has to measure time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

PATIENCE = 600.0  # as BOUND, which programs that import this from its folder do not find


class GatedFileSystem(AbstractFileSystem):
    """Passes all on to the local disk, writes only while the gate is open."""

    protocol = "gated"
    cachable = False

    def __init__(self, gate: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._gate = Path(gate)
        self._disk = LocalFileSystem()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return str(path).removeprefix("gated://").rstrip("/") or "/"

    def _pass(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._gate.exists():
            assert time.monotonic() < deadline, "nobody opens the gate"
            time.sleep(0.002)
        if Path(f"{self._gate}.fails").exists():
            raise OSError("the disk is on fire")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            self._pass()
            self._disk.makedirs(self._parent(path), exist_ok=True)
        return self._disk.open(path, mode)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._pass()
        self._disk.pipe_file(self._strip_protocol(path), value)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return self._disk.info(self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self._disk.ls(self._strip_protocol(path), detail=detail)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._disk.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        self._disk.mkdir(self._strip_protocol(path), create_parents=create_parents)

    def rm_file(self, path: str) -> None:
        self._disk.rm_file(self._strip_protocol(path))

    def rmdir(self, path: str) -> None:
        self._disk.rmdir(self._strip_protocol(path))

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        self._disk.mv(self._strip_protocol(path1), self._strip_protocol(path2))


class Gate:
    """The gate of a folder; open at first."""

    def __init__(self, folder: Any) -> None:
        fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
        self.root = f"gated://{folder}"
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._gate = Path(folder) / "gate"
        self._fails = Path(f"{self._gate}.fails")
        self.options = {"gate": str(self._gate)}

    def shut(self) -> None:
        self._gate.touch()

    def open(self) -> None:
        self._gate.unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which nothing is written."""
        self.shut()
        try:
            yield
        finally:
            self.open()

    def break_writes(self) -> None:
        self._fails.touch()

    def mend(self) -> None:
        self._fails.unlink(missing_ok=True)
