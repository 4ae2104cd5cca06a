"""Event files of TensorBoard, which wait in memory while a disk is full or a store is away."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from loggers.trackers.line_file import LineFile, LocalLines, open_lines

__all__ = ["EventFile", "open_summary_writer"]

_numbers = itertools.count()  # of the files of this process


class EventFile:
    """Stands in for tensorboard's ``EventFileWriter``, whose thread ends at the first failed write.

    An event is written at once to a local disk, and by `upload` to a store. What could not be
    written waits in memory, and the next write goes on where the last one stopped, so that no
    record is cut in the middle of the file. Safe to use from several threads.

    Args:
        folder: path or fsspec URL.
        suffix: end of the file's name.
        every_s: seconds between the uploads to a store.
    """

    def __init__(self, folder: str, suffix: str = "", every_s: float | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Not the names of tensorboard's writers, of which a script may have some in this folder.
        # TensorBoard reads files in the order of their names: those of one second, as of a run that
        # was resumed at once, differ in the microseconds, since neither pids nor "9" and "10" sort.
        microseconds = time.time_ns() // 1000
        parts = (*divmod(microseconds, 10**6), socket.gethostname(), os.getpid(), next(_numbers))
        name = "events.out.tfevents.{:010d}.{:06d}.{}.{}.{}.loggers".format(*parts)
        self._folder = folder
        self._file: LineFile = open_lines(folder, name + suffix, every_s, private=True)
        self._records = RecordWriter(self)
        self._lock = threading.Lock()
        metadata = SourceMetadata(writer="loggers")
        self.add_event(
            Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=metadata)
        )

    @property
    def is_dirty(self) -> bool:
        """True while events are not in the file."""
        return self._file.is_dirty

    def get_logdir(self) -> str:
        """Return the folder; tensorboard's name for it."""
        return self._folder

    def write(self, record: bytes) -> None:
        """Queue an encoded record; the ``RecordWriter`` calls this."""
        self._file.add(record)

    def add_event(self, event: Any) -> None:
        """Add an event, and write it if this is a local disk; what fails waits for `upload`."""
        record = event.SerializeToString()
        with self._lock:
            self._records.write(record)
            if isinstance(self._file, LocalLines):
                with suppress(OSError):
                    self._file.flush()

    def make_room(self) -> None:
        """Raise OSError if the disk has been full for so long that no more events may wait."""
        with self._lock:
            self._file.make_room()

    def upload(self) -> None:
        """Write what is pending: to a disk now, to a store if an upload is due."""
        with self._lock:
            self._file.flush()

    def flush(self) -> None:
        """Write what is pending, also to a store."""
        with self._lock:
            self._file.flush(force=True)

    def close(self) -> None:
        """Write what is pending and close the file."""
        with self._lock:
            self._file.close()


def open_summary_writer(folder: str, **options: Any) -> Any:
    """Return a ``SummaryWriter`` on an `EventFile`.

    Args:
        folder: path or fsspec URL.
        **options: arguments of ``SummaryWriter``.

    Raises:
        ImportError: torch or tensorboard is not installed.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from torch.utils.tensorboard import FileWriter, SummaryWriter

    class Files(FileWriter):
        def __init__(self, writer: Any) -> None:
            self.event_writer = EventFile(writer.log_dir, writer.filename_suffix, writer.flush_secs)

    class Writer(SummaryWriter):
        @property
        def events(self) -> EventFile:
            events: EventFile = self._get_file_writer().event_writer
            return events

        def _get_file_writer(self) -> Any:
            """Return the writer of the main file; torch's creates one with a thread."""
            writer: Any = self
            if writer.file_writer is None:
                files: Any = Files(self)
                writer.file_writer, writer.all_writers = files, {folder: files}
                if (step := writer.purge_step) is not None:
                    start = SessionLog(status=SessionLog.START)
                    files.add_event(Event(step=step, file_version="brain.Event:2"))
                    files.add_event(Event(step=step, session_log=start))
                    writer.purge_step = None
            return writer.file_writer

    return Writer(folder, **options)
