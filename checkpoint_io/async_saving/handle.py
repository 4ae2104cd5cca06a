"""One save on a thread: when it has ended, and how."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from checkpoint_io.async_save import exit as exiting
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.saver.save import SaveJob

__all__ = ["SaveHandle"]

_GLANCE = 0.5  # seconds; a wait without an end cannot be interrupted everywhere


class SaveHandle:
    """A save that runs on a thread of its own; made by `BackgroundSaver`.

    An error is raised by whoever asks first: `wait`, `exception`, or the saver. One
    that nobody asks for is printed when the process ends, whose exit status is then 1.

    Attributes:
        url: where it saves to.
        process: the id of the process that saves.
        read: whether somebody has asked how it ended.

    Example:
        >>> import torch
        >>> from checkpoint_io import BackgroundSaver
        >>> saver = BackgroundSaver()
        >>> handle = saver.save("memory://doc-background/handle", {"w": torch.ones(2)})
        >>> handle.wait().generation, handle.done(), handle.exception()
        (1, True, None)
        >>> saver.close()
    """

    def __init__(
        self, job: SaveJob, group: ProcessGroupLike, afterwards: Callable[[], None] | None = None
    ) -> None:
        self.url = job.url
        self.process = os.getpid()
        self._steps: tuple[SaveJob, ProcessGroupLike, Callable[[], None] | None] | None
        self._steps = job, group, afterwards
        self._may_begin = threading.Event()
        self._cancelled = False
        self._over = threading.Event()
        self._manifest: Manifest | None = None
        self._error: BaseException | None = None
        self.read = False
        self._thread = threading.Thread(target=self._work, name=f"save to {job.url}", daemon=False)

    def done(self) -> bool:
        """Whether it has ended on this process, well or not.

        Raises:
            RuntimeError: this process was forked from the one that saves.
        """
        self._refuse_child()
        return self._over.is_set()

    def wait(self) -> Manifest:
        """Wait until it has ended; the manifest of the checkpoint, which is durable.

        An interrupt (Ctrl-C) ends the wait and not the save.

        Raises:
            CheckpointError: it failed; nothing was committed.
            RuntimeError: this process was forked from the one that saves.
        """
        error = self.exception()
        if error is not None:
            raise error
        assert self._manifest is not None
        return self._manifest

    def exception(self) -> BaseException | None:
        """Wait until it has ended; its error, None if it went well.

        Raises:
            RuntimeError: this process was forked from the one that saves.
        """
        self.join()
        self.read = True
        exiting.release(self)
        return self._error

    def join(self) -> None:
        """Wait until it has ended, without asking how."""
        self._refuse_child()
        while not self.ended(_GLANCE):
            pass
        if self._thread is not threading.current_thread():
            self._thread.join()  # it has nothing left to do

    def ended(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most so many seconds; False if it has not."""
        return self._over.wait(timeout)

    @property
    def unread(self) -> BaseException | None:
        """The error that nobody has asked for yet."""
        return None if self.read else self._error

    # --- for the saver ------------------------------------------------------------------------

    def start(self) -> None:
        """Make the thread, which waits for `go`."""
        self._thread.start()
        exiting.watch(self)

    def go(self, *, cancel: bool = False) -> None:
        """Let the thread write; or end it without having begun."""
        self._cancelled = cancel
        self._may_begin.set()
        if cancel:
            self.read = True
            exiting.release(self)

    def _work(self) -> None:
        self._may_begin.wait()
        steps, self._steps = self._steps, None  # the copies must not outlive the save
        try:
            if steps is not None and not self._cancelled:
                job, group, afterwards = steps
                self._manifest = job.run(group, progress=False)
                if afterwards is not None:
                    afterwards()
        except BaseException as error:
            self._error = error
        finally:
            del steps
            self._over.set()
            if self._error is None:
                exiting.release(self)

    def _refuse_child(self) -> None:
        if os.getpid() != self.process:
            raise RuntimeError(
                f"the save to {self.url} belongs to process {self.process}, from which this one "
                "was forked: ask there"
            )
