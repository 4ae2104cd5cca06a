"""Save on a thread: `BackgroundSaver` and the `SaveHandle` of one save."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from checkpoint_io.async_save.staging import HostBuffers
from checkpoint_io.errors import CheckpointError, CheckpointWarning
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.group import (
    Outcome,
    ProcessGroupLike,
    SingleProcess,
    agree,
    failed_ranks,
    raise_failure,
)
from checkpoint_io.saver.save import SaveJob, prepare_save
from checkpoint_io.warning import warn

__all__ = ["BackgroundSaver", "SaveHandle"]

_NOTICE_DELAY = 1.0  # seconds of waiting before the notice that names the save
# Seconds. An endless wait cannot be interrupted on every platform, so waits are repeated.
_POLL_INTERVAL = 0.5


# Global, as threads belong to the process. A forked child inherits the list and ignores the saves
# of its parent.
_watched: list[SaveHandle] = []
_saving_threads: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[SaveHandle | None]]
_saving_threads = weakref.WeakKeyDictionary()


class SaveHandle:
    """A save that runs on the thread of a `BackgroundSaver`.

    An error is raised, or returned, by the first call that asks for it: `wait`, `exception`, or one
    of the saver. An error that was never asked for is printed when the process exits, with exit
    status 1.

    Attributes:
        url: the folder that is saved to.
        process: the id of the process that saves.
        read: whether the outcome was asked for.

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
        self._finished = threading.Event()
        self._manifest: Manifest | None = None
        self._error: BaseException | None = None
        self.read = False

    def done(self) -> bool:
        """Return whether the save has ended on this rank, successfully or not.

        Raises:
            RuntimeError: if this process was forked from the one that saves.
        """
        self._check_not_forked()
        return self._finished.is_set()

    def wait(self) -> Manifest:
        """Wait for the end of the save; return the manifest of the checkpoint, now durable.

        An interrupt (Ctrl-C) ends the wait, not the save.

        Raises:
            CheckpointError: if the save failed; nothing was committed.
            RuntimeError: if this process was forked from the one that saves.
        """
        error = self.exception()
        if error is not None:
            raise error
        assert self._manifest is not None
        return self._manifest

    def exception(self) -> BaseException | None:
        """Wait for the end of the save; return its error, or None if it succeeded.

        Raises:
            RuntimeError: if this process was forked from the one that saves.
        """
        self.join()
        self.read = True
        _stop_waiting_for(self)
        return self._error

    def join(self) -> None:
        """Wait for the end of the save, without asking for its outcome."""
        self._check_not_forked()
        while not self.ended(_POLL_INTERVAL):
            pass

    def ended(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the end of the save; return whether it has ended."""
        return self._finished.wait(timeout)

    @property
    def unread(self) -> BaseException | None:
        """The error, if it was not asked for yet."""
        return None if self.read else self._error

    # --- for BackgroundSaver -------------------------------------------------------------------

    def cancel(self) -> None:
        """End a save that was not started."""
        self._steps, self.read = None, True
        self._finished.set()
        _stop_waiting_for(self)

    def run(self) -> None:
        """Save, on the saving thread."""
        steps, self._steps = self._steps, None  # the handle must not keep the copies alive
        try:
            if steps is not None:
                self._manifest = _run_job(*steps)
        except BaseException as error:
            self._error = error
        finally:
            del steps  # the copies are free once the save has ended
            if self._error is None:
                _stop_waiting_for(self)
            self._finished.set()

    def _check_not_forked(self) -> None:
        if os.getpid() != self.process:
            raise RuntimeError(
                f"the save to {self.url} runs in process {self.process}, from which this one was "
                "forked: wait for it there"
            )


def _run_job(
    job: SaveJob, group: ProcessGroupLike, afterwards: Callable[[], None] | None
) -> Manifest:
    """Run a save; no reference to the job is left behind."""
    manifest = job.run(group, progress=False)
    if afterwards is not None:
        afterwards()
    return manifest


class _SavingThread:
    """A thread that runs one save after another, and is idle in between.

    It is a daemon, so that an idle one does not keep the process alive; `_wait_at_exit` waits for
    saves, and ends it.
    """

    def __init__(self) -> None:
        self._saves: SimpleQueue[SaveHandle | None] = SimpleQueue()
        work = partial(_run_saves, self._saves)  # no reference to self
        self._thread = threading.Thread(target=work, name="checkpoint_io save", daemon=True)
        self._thread.start()
        _saving_threads[self._thread] = self._saves
        weakref.finalize(self, self._saves.put, None).atexit = False

    def run(self, handle: SaveHandle) -> None:
        """Begin a save."""
        self._saves.put(handle)

    def end(self) -> None:
        """End the thread after its last save, without waiting for that."""
        self._saves.put(None)


def _run_saves(saves: SimpleQueue[SaveHandle | None]) -> None:
    """Run saves until the sentinel (the body of the thread)."""
    while (handle := saves.get()) is not None:
        handle.run()
        del handle  # it must not live until the next save


class BackgroundSaver:
    """Saves on a thread; a call returns once the state is copied to host memory.

    The host memory is reused, so from the second save on, the caller is blocked for about the time
    that it takes to copy what this rank writes. At most one save is in progress. With several
    ranks, all of them make the same calls in the same order, and a save that fails on one rank
    raises on all.

    The process does not exit before the save in progress has ended, unless it is killed by a signal
    or calls ``os._exit``. Keep the process group until then.

    Args:
        policy: what to do if the previous save is still in progress: "wait" for it (the default),
            or "skip" the new one, which then returns None.
        group: the ranks that save together, such as `TorchGroup()`. It is used by the calling
            thread; the first save creates another one (gloo) for the saving thread. None means this
            process alone.

    Attributes:
        skipped: number of skipped saves.

    Raises:
        ValueError: if the policy is unknown.
        TypeError: if a group of several ranks has no method `beside`.

    Example:
        >>> import torch
        >>> from checkpoint_io import BackgroundSaver, load
        >>> weight = torch.ones(2)
        >>> saver = BackgroundSaver()
        >>> handle = saver.save("memory://doc-background/last", {"weight": weight})
        >>> _ = weight.zero_()  # training goes on
        >>> saver.close()  # waits, and raises the error if it failed
        >>> load("memory://doc-background/last").state["weight"]
        tensor([1., 1.])
    """

    def __init__(self, *, policy: str = "wait", group: ProcessGroupLike | None = None) -> None:
        self.policy = _require_policy(policy)
        self.skipped = 0
        self._group = group or SingleProcess()
        if self._group.world_size > 1 and not hasattr(self._group, "beside"):
            raise TypeError(
                f"{type(self._group).__name__} has no method beside() that creates a group for "
                "the saving thread: pass a checkpoint_io.TorchGroup"
            )
        self._thread_group: Any = None
        self._buffers = HostBuffers()
        self._handle: SaveHandle | None = None
        self._thread: _SavingThread | None = None
        self._process = os.getpid()

    @property
    def pending(self) -> bool:
        """True if a save has not ended, or its outcome was not asked for; the same on all ranks."""
        return self._own_pending_save() is not None

    def save(
        self,
        url: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        local_state: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        generation: int | None = None,
        max_shard_size: int | str = "5GB",
        replicated: bool | Callable[[str], bool] = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> SaveHandle | None:
        """Copy the current state and write it in the background. Collective.

        Args:
            url, state, local_state, metadata, generation: as for `checkpoint_io.save`.
            max_shard_size, replicated, storage_options: likewise.

        Returns:
            The handle of the save; None if it was skipped.

        Raises:
            CheckpointError: if the previous save failed, or this state cannot be saved; nothing of
                it was written.
        """
        if not self.make_room():
            return None
        job = prepare_save(
            url,
            state,
            local_state=local_state,
            metadata=metadata,
            group=self._group,
            max_shard_size=max_shard_size,
            next_generation=generation,
            replicated=replicated,
            storage_options=storage_options,
        )
        return self._launch(job, None)

    def submit(
        self,
        job: SaveJob,
        *,
        policy: str | None = None,
        afterwards: Callable[[], None] | None = None,
    ) -> SaveHandle | None:
        """Run a prepared save in the background, as `save` does. Collective.

        Args:
            job: from `prepare_save`; its tensors are copied before this returns.
            policy: overrides the saver's policy for this save.
            afterwards: called on the saving thread of each rank once the checkpoint is durable; an
                error that it raises is one of the save.
        """
        return self._launch(job, afterwards) if self.make_room(policy) else None

    def make_room(self, policy: str | None = None) -> bool:
        """Return whether a new save may begin now. Collective.

        With policy "wait", wait for the previous one; with "skip", return False if it is under way.

        Args:
            policy: overrides the saver's policy.

        Raises:
            CheckpointError: if the previous save failed.
        """
        policy = self.policy if policy is None else _require_policy(policy)
        if policy == "wait" or self.poll():
            self.wait()
            return True
        assert self._handle is not None
        self.skipped += 1
        if self.skipped == 1:
            warn(
                f"skipping a save, because the one to {self._handle.url} is still under way: "
                "save less often, or use policy='wait'; warned once, `skipped` counts all",
                CheckpointWarning,
            )
        return False

    def poll(self) -> bool:
        """Return whether no save is in progress, without waiting. Collective while one is pending.

        The ranks agree in one small collective. Once the save has ended on all of them, it is no
        longer pending.

        Raises:
            CheckpointError: if the save failed; raised on all ranks by the same call.
        """
        handle = self._own_pending_save()
        if handle is None:
            return True
        if _on_any(self._group, not handle.done()):
            return False
        self._collect(handle)
        return True

    def wait(self) -> None:
        """Wait until no save is in progress. Collective while one is pending.

        An interrupt (Ctrl-C) ends the wait, not the save.

        Raises:
            CheckpointError: if the save failed.
        """
        handle = self._own_pending_save()
        if handle is not None:
            handle.join()
            self._collect(handle)

    def abandon(self) -> SaveHandle | None:
        """Return the pending save and forget it, so that no later call needs the other ranks.

        For a script that ends with an error, when other ranks may be gone.
        """
        handle, self._handle = self._own_pending_save(), None
        if handle is not None:  # the save still uses them
            self._thread_group, self._buffers = None, HostBuffers()
            self._end_thread()
        return handle

    def _end_thread(self) -> None:
        """End the thread after the save that it may be running."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()

    def reserve(self, nbytes: int) -> None:
        """Take host memory for the copy of the first save, on a thread; nothing if there is some.

        The first save then stalls its caller as shortly as later ones. Too little is no error.

        Args:
            nbytes: about how many bytes of tensors this rank will save.

        Example:
            >>> import torch
            >>> from checkpoint_io import BackgroundSaver
            >>> saver = BackgroundSaver()
            >>> saver.reserve(1 << 20)
            >>> _ = saver.save("memory://doc-reserve/a", {"w": torch.ones(2)})
            >>> saver.wait()
        """
        if self._handle is None:
            self._buffers.reserve(nbytes)

    def free_memory(self) -> None:
        """Free the host memory, unless a save uses it; the next save allocates it again."""
        if self._handle is None:
            self._buffers.free()

    def close(self) -> None:
        """Wait, then free the host memory and close the group of the saving thread. Collective.

        Raises:
            CheckpointError: if the last save failed.
        """
        try:
            self.wait()
        finally:
            if self._handle is None:
                self._buffers.free()
                self._end_thread()
                group, self._thread_group = self._thread_group, None
                if group is not None and hasattr(group, "close"):
                    group.close()

    # --- private ------------------------------------------------------------------------------

    def _launch(self, job: SaveJob, afterwards: Callable[[], None] | None) -> SaveHandle:
        """Copy the tensors and start writing, on all ranks or on none."""
        if self._thread_group is None:
            several = self._group.world_size > 1
            self._thread_group = self._group.beside() if several else self._group  # type: ignore[attr-defined]
        handle = SaveHandle(job, self._thread_group, afterwards)

        def copy() -> _SavingThread:
            job.copy_tensors(self._buffers.fill)
            self._thread = self._thread or _SavingThread()
            return self._thread

        def cancel(gathered: bool) -> None:
            handle.cancel()
            if gathered:  # the copy may have failed for lack of memory: do not keep any
                self._buffers.free()

        # No rank writes before all have their copies: this runs on the calling thread, so a failure
        # raises at once on every rank, and the threads have nothing to undo.
        copied = Outcome.of(copy)
        agree(
            self._group,
            replace(copied, value=None),
            f"saving to {job.url} did not begin, because its state could not be copied to host "
            "memory",
            cleanup=cancel,
        )
        self._handle = handle
        _wait_at_exit_for(handle)
        copied.value.run(handle)
        return handle

    def _collect(self, handle: SaveHandle) -> None:
        """Raise on all ranks if the ended save failed on any."""
        self._handle = None
        known = handle.read
        outcome = Outcome(None, handle.exception())
        report = {**outcome.to_plain(), "known": known}
        try:
            # The group of the saving thread is idle now and has the longest timeout: the thread of
            # another rank may still be busy with cleaning up.
            outcomes = self._thread_group.all_gather_object(report)
        except Exception as problem:
            if outcome.error is not None:
                raise outcome.error from problem
            raise CheckpointError(
                f"the save to {handle.url} has ended here, but the other ranks do not answer"
            ) from problem
        failed = failed_ranks(outcomes)
        if all(outcomes[rank]["known"] for rank in failed):
            return  # nothing failed, or each failed rank has asked its handle already
        if outcome.error is not None:
            raise outcome.error
        raise_failure(f"saving to {handle.url} failed", outcomes, outcome)

    def _own_pending_save(self) -> SaveHandle | None:
        """Return the pending save; a forked child has none."""
        if self._process != os.getpid():
            self._process, self._handle, self._thread = os.getpid(), None, None
            self._thread_group, self._buffers = None, HostBuffers()
        return self._handle


def _require_policy(policy: str) -> str:
    if policy not in ("wait", "skip"):
        raise ValueError(f'policy is "wait" or "skip", not {policy!r}')
    return policy


def _on_any(group: ProcessGroupLike, flag: bool) -> bool:
    """Return whether the flag is True on any rank; by a small all-reduce if the group has one."""
    if group.world_size == 1:
        return flag
    vote = getattr(group, "on_any", None)
    return bool(vote(flag)) if vote is not None else any(group.all_gather_object(flag))


_registered = False


def _wait_at_exit_for(save: SaveHandle) -> None:
    """Wait for a save at process exit, unless it is released first."""
    global _registered
    _watched.append(save)
    if not _registered:
        _registered = True
        _register_before_executors(_wait_at_exit)


def _stop_waiting_for(save: SaveHandle) -> None:
    """Stop watching a save that has ended and whose error, if any, was asked for."""
    with suppress(ValueError):
        _watched.remove(save)


def _register_before_executors(function: Callable[[], None]) -> None:
    """Call a function at interpreter shutdown, before thread pools refuse work.

    `atexit` runs too late: uploads and name lookups need the pools.
    """
    # This import registers the shutdown of the pools. The last function registered is called first.
    import concurrent.futures.thread  # noqa: F401

    register = getattr(threading, "_register_atexit", None)
    if register is None:  # the thread of a save is not a daemon: the process waits for it anyway
        atexit.register(function)
        return
    with suppress(RuntimeError):  # the shutdown has already begun
        register(function)


def _wait_at_exit() -> None:
    """Wait for pending saves, then print the errors that were not asked for."""
    pending = [save for save in list(_watched) if save.process == os.getpid()]
    try:
        for save in pending:
            if not save.ended(_NOTICE_DELAY):
                _print(f"waiting for the save to {save.url} before exiting; Ctrl-C aborts it")
                save.ended()
    except KeyboardInterrupt:
        _print("the save is aborted; the previous checkpoint is valid, unless the new one is")
        _flush()
        os._exit(130)  # a thread cannot be stopped
    # A thread that frees a tensor while the interpreter ends aborts the process.
    for thread, saves in list(_saving_threads.items()):
        saves.put(None)
        thread.join(_NOTICE_DELAY)
    errors = [(save.url, save.unread) for save in pending if save.unread is not None]
    for url, error in errors:
        _print(f"the save to {url} FAILED, and the script ended without asking for its outcome:")
        traceback.print_exception(error, file=sys.stderr)
    if errors and not hasattr(sys, "last_value"):  # an unhandled exception fails the script anyway
        atexit.register(_fail)


def _fail() -> None:
    """Exit with status 1, after the remaining exit handlers, which cannot set a status."""
    atexit.unregister(_fail)
    atexit._run_exitfuncs()
    _flush()
    os._exit(1)


def _print(text: str) -> None:
    with suppress(Exception):
        print(f"[checkpoint_io] {text}", file=sys.stderr, flush=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
