"""BackgroundSaver, SaveHandle."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from checkpoint_io.async_save import exit as exiting
from checkpoint_io.async_save.staging import HostBuffers
from checkpoint_io.errors import CheckpointError, CheckpointWarning
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.group import ProcessGroupLike, SingleProcess
from checkpoint_io.outcome import Outcome, failed_ranks, raise_failure
from checkpoint_io.saver.commit import following
from checkpoint_io.saver.save import SaveJob, prepare_save

__all__ = ["BackgroundSaver", "SaveHandle"]

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


class BackgroundSaver:
    """Saves on a thread: a call returns once the state is copied to host memory.

    The copies are made into memory that is used again by the next save, so from the second save
    on the caller stands still for about as long as it takes to copy what this rank writes. At
    most one save is under way. With several ranks, all of them make the same calls in the same
    order, and a save that fails on one raises on all.

    The process does not exit before the save that is under way has ended, whatever ends the
    script but a signal that kills or ``os._exit``. Keep the process group until then.

    Args:
        policy: what a save does that finds the one before still under way: "wait" for it (the
            default), or "skip", which returns None and writes nothing.
        group: the processes that save together, such as `TorchGroup()`. It serves the calling
            thread; for the saving thread a gloo group of its own is made with the first save.
            None means this process alone.

    Attributes:
        skipped: how many saves were skipped.

    Raises:
        ValueError: an unknown policy.
        TypeError: a group of several ranks that has no method `beside`.

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
        self.policy = _checked_policy(policy)
        self.skipped = 0
        self._group = group or SingleProcess()
        if self._group.world_size > 1 and not hasattr(self._group, "beside"):
            raise TypeError(
                f"{type(self._group).__name__} has no method beside() that gives the saving "
                "thread a group of its own: pass a checkpoint_io.TorchGroup"
            )
        self._own_group: Any = None
        self._buffers = HostBuffers()
        self._handle: SaveHandle | None = None
        self._process = os.getpid()

    @property
    def pending(self) -> bool:
        """Whether a save is under way, or its end was not asked for yet; the same on all ranks."""
        return self._pending_here() is not None

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
        """Copy the state as it is now, and write it in the background. Collective.

        Args:
            url, state, local_state, metadata, generation, max_shard_size, replicated,
                storage_options: as for `checkpoint_io.save`.

        Returns:
            What to wait with; None if the save was skipped.

        Raises:
            CheckpointError: the save before has failed, or this one's state cannot be saved;
                nothing of it was written.
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
            next_generation=following(generation),
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
        """The same for a save that is prepared already. Collective.

        Args:
            job: from `prepare_save`; its tensors are copied before this returns.
            policy: overrides the saver's for this one.
            afterwards: called on the saving thread of each rank once the checkpoint is durable; its
                error counts as the save's.
        """
        return self._launch(job, afterwards) if self.make_room(policy) else None

    def make_room(self, policy: str | None = None) -> bool:
        """Whether the next save may begin: after waiting, or at once, by the policy. Collective.

        Args:
            policy: overrides the saver's.

        Raises:
            CheckpointError: the save before has failed.
        """
        policy = self.policy if policy is None else _checked_policy(policy)
        if policy == "wait" or self.poll():
            self.wait()
            return True
        assert self._handle is not None
        self.skipped += 1
        if self.skipped == 1:
            warnings.warn(
                f"a save is skipped, because the one to {self._handle.url} is still under way: "
                "save less often, or take the policy 'wait'; said once, `skipped` counts",
                CheckpointWarning,
                stacklevel=3,
            )
        return False

    def poll(self) -> bool:
        """Whether no save is under way, without waiting for one. Collective while one is pending.

        Ranks agree by one small message. Once the save has ended on all of them, it is pending no
        more.

        Raises:
            CheckpointError: it has failed; raised on all ranks by the same call.
        """
        handle = self._pending_here()
        if handle is None:
            return True
        if _on_any(self._group, not handle.done()):
            return False
        self._collect(handle)
        return True

    def wait(self) -> None:
        """Wait until no save is under way. Collective while one is pending.

        An interrupt (Ctrl-C) ends the wait and not the save.

        Raises:
            CheckpointError: it has failed.
        """
        handle = self._pending_here()
        if handle is not None:
            handle.join()
            self._collect(handle)

    def abandon(self) -> SaveHandle | None:
        """What is pending, for this rank alone to wait with: the ranks do not meet any more.

        For the end of a script with an error, when others may be gone.
        """
        handle, self._handle = self._pending_here(), None
        if handle is not None:  # it still uses the copies and the group
            self._own_group, self._buffers = None, HostBuffers()
        return handle

    def free_memory(self) -> None:
        """Give the host memory back, unless a save uses it; the next save takes new."""
        if self._handle is None:
            self._buffers.free()

    def close(self) -> None:
        """Wait, then give back the host memory and the group of the saving thread. Collective.

        Raises:
            CheckpointError: the last save has failed.
        """
        try:
            self.wait()
        finally:
            if self._handle is None:
                self._buffers.free()
                group, self._own_group = self._own_group, None
                if group is not None and hasattr(group, "close"):
                    group.close()

    # --- inside -------------------------------------------------------------------------------

    def _launch(self, job: SaveJob, afterwards: Callable[[], None] | None) -> SaveHandle:
        """Copy and begin on all ranks, or on none."""
        if self._own_group is None:
            several = self._group.world_size > 1
            self._own_group = self._group.beside() if several else self._group  # type: ignore[attr-defined]
        handle = SaveHandle(job, self._own_group, afterwards)

        def copy() -> None:
            job.rebind(self._buffers.fill(job.tensors))
            handle.start()

        copied = Outcome.of(copy)
        outcomes: list[Any] | None = None
        try:
            outcomes = self._group.all_gather_object(copied.to_plain())
        finally:
            if outcomes is None:  # a rank is gone, or an interrupt came
                handle.go(cancel=True)
        if failed_ranks(outcomes):
            handle.go(cancel=True)
            self._buffers.free()
            raise_failure(
                f"saving to {job.url} did not begin, because its state could not be copied to "
                "host memory",
                outcomes,
                copied,
            )
        self._handle = handle
        handle.go()
        return handle

    def _collect(self, handle: SaveHandle) -> None:
        """Raise on all ranks if the save that has ended failed on any."""
        self._handle = None
        known = handle.read
        own = Outcome(None, handle.exception())
        report = {**own.to_plain(), "known": known}
        try:
            # in the group of the saving thread, which is idle now and waits longest: on another
            # rank that thread may still be tidying up
            outcomes = self._own_group.all_gather_object(report)
        except Exception as problem:
            if own.error is not None:
                raise own.error from problem
            raise CheckpointError(
                f"the save to {handle.url} has ended here, but the other ranks do not answer"
            ) from problem
        failed = failed_ranks(outcomes)
        if all(outcomes[rank]["known"] for rank in failed):
            return  # nothing failed, or whoever it failed for has asked the handle
        if own.error is not None:
            raise own.error
        raise_failure(f"saving to {handle.url} failed", outcomes, own)

    def _pending_here(self) -> SaveHandle | None:
        """The save that is under way; a forked child begins with none."""
        if self._process != os.getpid():
            self._process, self._handle = os.getpid(), None
            self._own_group, self._buffers = None, HostBuffers()
        return self._handle


def _checked_policy(policy: str) -> str:
    if policy not in ("wait", "skip"):
        raise ValueError(f'policy is "wait" or "skip", not {policy!r}')
    return policy


def _on_any(group: ProcessGroupLike, flag: bool) -> bool:
    """Whether the flag is up on any rank; by one small all-reduce where the group has one."""
    if group.world_size == 1:
        return flag
    vote = getattr(group, "on_any", None)
    return bool(vote(flag)) if vote is not None else any(group.all_gather_object(flag))
