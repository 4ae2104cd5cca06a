"""Files of scripts and notebooks: read in their encoding, replaced in one step."""

from __future__ import annotations

import os
import tempfile
import tokenize
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO

from accel_callbacks.migrate.notebook import migrate_notebook
from accel_callbacks.migrating.findings import Migration, UnreadableError
from accel_callbacks.migrating.scripts import migrate_script

__all__ = ["MovedFile", "read_and_move"]

MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class MovedFile:
    """A file, as it was read and as it is to be.

    Attributes:
        path: where it is.
        data: its bytes as they were read.
        encoding: of its text.
        migration: what is to change.
    """

    path: str
    data: bytes
    encoding: str
    migration: Migration

    def write(self) -> None:
        """Replace the file (that a link leads to) in one step; its permissions stay.

        Raises:
            OSError: the file, or its folder, cannot be written.
            ValueError: the file has changed since it was read.
        """
        target = os.path.realpath(self.path)
        new = self.migration.after.encode(self.encoding)
        if not os.access(target, os.W_OK):
            raise PermissionError(13, "is read-only", self.path)
        descriptor, temporary = tempfile.mkstemp(
            prefix=".accel-migrate-", dir=os.path.dirname(target)
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(new)
                file.flush()
                os.fsync(file.fileno())
            status = os.stat(target)
            os.chmod(temporary, status.st_mode & 0o7777)
            with suppress(AttributeError, PermissionError):
                os.chown(temporary, status.st_uid, status.st_gid)
            with open(target, "rb") as now:
                if now.read() != self.data:
                    raise ValueError("was changed by somebody else meanwhile: run this again")
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


def read_and_move(path: str) -> MovedFile:
    """Read a script or a notebook and move it; nothing is written.

    Raises:
        OSError: the file cannot be read.
        UnreadableError: it is neither a script nor a notebook.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(2, "there is no such file", path)
    if os.path.getsize(path) > MAX_BYTES:
        raise UnreadableError(f"is larger than {MAX_BYTES >> 20} MiB")
    with open(path, "rb") as file:
        data = file.read()
    notebook = path.endswith(".ipynb")
    encoding = "utf-8" if notebook else _encoding(data)
    try:
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise UnreadableError(f"is no text in {encoding}: {error}") from error
    move: Callable[[str], Migration] = migrate_notebook if notebook else migrate_script
    return MovedFile(path, data, encoding, move(text))


def _encoding(data: bytes) -> str:
    """Find out the encoding of a script by its mark or its first lines."""
    try:
        return tokenize.detect_encoding(BytesIO(data).readline)[0]
    except SyntaxError as error:
        raise UnreadableError(str(error)) from error
