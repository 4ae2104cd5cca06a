"""Recognize out-of-memory errors, and search a batch size that fits."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import abort_run, group_is_aborted
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.topology import resolve_topology
from accel_callbacks.errors import RemoteError
from accel_callbacks.memory import clear_device_cache

__all__ = [
    "find_executable_batch_size",
    "should_reduce_batch_size",
]

_PHRASES = (
    "out of memory",  # of CUDA, HIP, XPU, MPS, NCCL
    "can't allocate memory",  # of the CPU
    "not enough memory",  # of the CPU, on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no memory for the handle
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # raised by cuDNN for a batch too large for it
    "PT_DEVMEM Allocation failed",  # of HPU
)
_WHERE = "find_executable_batch_size"
_OUTCOME = "attempt"  # "{_OUTCOME}/{rank}" in the store: empty to try again, else the error


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether an exception is an out-of-memory error, of this rank or of a remote one.

    Example:
        >>> from accel_callbacks.addons.tuning.executable_batch_size import (
        ...     should_reduce_batch_size,
        ... )
        >>> should_reduce_batch_size(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."))
        True
        >>> should_reduce_batch_size(ValueError("out of range"))
        False
    """
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(exception, RemoteError):
        text = _final_lines(str(exception))
        return "MemoryError" in text or any(phrase in text for phrase in _PHRASES)
    return isinstance(exception, RuntimeError) and any(p in str(exception) for p in _PHRASES)


def _final_lines(report: str) -> str:
    """Return the lines of a traceback after its last line of code: the error itself."""
    lines = report.rstrip().splitlines()
    code = [index for index, line in enumerate(lines) if line.startswith("  ")]
    return "\n".join(lines[code[-1] + 1 :] if code else lines)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Decorator: call the function with a smaller batch size each time memory runs out.

    The function gets the batch size as its first argument. Each call starts with
    ``starting_batch_size``, and returns what the function returns.

    With several processes all must make the call, and they try the same size together: if memory
    runs out on one process, all retry with the next size, and any other error of one ends the
    search on all. The collectives in which the others wait then fail, at once on gloo and within a
    second or two on NCCL, and the processes join a new process group for the next attempt. So make
    the Accelerator outside of the function, call :meth:`Accelerator.free_memory` first inside of
    it, and prepare everything again; models and groups made outside cannot be used after a failed
    attempt. A process that makes no collective notices a failure at the end of its attempt.

    Args:
        function: the function, or ``None`` where the decorator is called with arguments.
        starting_batch_size: the first size, 128 by default.
        reduce_batch_size_fn: returns the next size, called with the one that failed or, as in
            Accelerate, without arguments; 0.9 times the size by default. The smallest of all
            processes counts.

    Raises:
        TypeError: the arguments do not fit; the batch size must be left out of the call.
        ValueError: ``reduce_batch_size_fn`` returned no smaller integer.
        RuntimeError: the batch size has reached zero.
        RemoteError: an attempt failed on another process, with another error.

    Example:
        >>> from accel_callbacks import find_executable_batch_size
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size, epochs):
        ...     if batch_size > 50:
        ...         raise MemoryError
        ...     return f"{epochs} epochs with {batch_size}"
        >>> train(3)
        '3 epochs with 45'
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    target = function

    @functools.wraps(target)
    def search(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(target, args, kwargs)
        size = _smallest(starting_batch_size)
        problem: str | None = "no attempt was made"
        while size > 0:
            clear_device_cache(garbage_collection=True)
            result, problem = attempt(target, size, args, kwargs)
            if problem is None:
                return result
            if group_is_aborted():
                resolve_topology(anew=True)  # joins a new group, with all ranks
            with shared_failure("reduce_batch_size_fn"):
                size = _next_size(reduce_batch_size_fn, size)
            size = _smallest(size)
        raise RuntimeError(
            "No executable batch size found, reached zero: memory runs out with every size "
            f"({problem}). Begin with a larger starting_batch_size than {starting_batch_size}, or "
            "make the model or its inputs smaller."
        )

    return search


def _check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise TypeError for arguments that do not fit, such as a batch size that is passed too."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of functions written in C
        return
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        passed = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        raise TypeError(
            f"{name}({', '.join(passed)}): {error}. find_executable_batch_size passes the batch "
            f"size as the first argument of {name}{signature}; leave it out of the call."
        ) from None


def attempt(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, str | None]:
    """Collective: return (the result, None), or (None, the message) if memory ran out on a rank.

    Nothing of a failed attempt is referenced when this returns: the exception's frames would keep
    alive what fills the memory.
    """
    try:
        result = function(size, *args, **kwargs)
        collectives.barrier()  # an attempt succeeds on all ranks or on none
        return result, None
    except BaseException as error:
        problem = _settle(error)
    _wait_for_outcomes()
    return None, problem


def _settle(error: BaseException) -> str:
    """Abort the attempt on all ranks; return the message if memory ran out, else raise."""
    cause = abort_run(error, _WHERE)
    if should_reduce_batch_size(cause):
        _publish_outcome("")
        return (_final_lines(str(cause)) or type(cause).__name__).splitlines()[0][:200]
    _publish_outcome(f"{type(cause).__name__}: {cause}")
    if cause is error:
        raise error
    raise cause from error


def _publish_outcome(failure: str) -> None:
    """Publish in the store if this rank tries again (an empty string), or why not.

    Through the store, because the group has been aborted and has no collectives any more.
    """
    if group_is_aborted():
        with suppress(dist.DistError):  # the store is gone if rank 0 is
            collectives.store().set(f"{_OUTCOME}/{collectives.rank()}", failure)


def _wait_for_outcomes() -> None:
    """Block until all ranks have ended their attempt.

    Raises:
        RemoteError: a rank failed with another error, and does not try again.
        RuntimeError: a rank did not end its attempt in time.
    """
    if not group_is_aborted():
        return
    store, waiting = collectives.store(), set(range(collectives.world_size()))
    timeout = store.timeout  # that of the process group
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        for rank in [rank for rank in waiting if store.check([f"{_OUTCOME}/{rank}"])]:
            waiting.discard(rank)
            failure = store.get(f"{_OUTCOME}/{rank}").decode()
            if failure:
                raise RemoteError(rank=rank, where=_WHERE, details=failure)
        if waiting and time.monotonic() > deadline:
            raise RuntimeError(
                f"memory ran out, and processes {sorted(waiting)} have not ended their attempt "
                "within the timeout of the process group; give the first Accelerator a longer "
                "timeout= if they only compute."
            )
        time.sleep(0.02 if waiting else 0)


def _next_size(reduce: Callable[..., int] | None, size: int) -> int:
    """Return the next size to try.

    Raises:
        ValueError: it is not smaller, or no integer.
    """
    if reduce is None:
        return int(size * 0.9)
    try:
        inspect.signature(reduce).bind(size)
    except TypeError:
        smaller = reduce()
    else:
        smaller = reduce(size)
    if not isinstance(smaller, int) or not 0 <= smaller < size:
        raise ValueError(
            f"reduce_batch_size_fn gave {smaller!r} after {size} failed; it must give a smaller "
            "whole number, 0 to give up."
        )
    return smaller


def _smallest(size: int) -> int:
    """Collective: return the smallest size of all ranks."""
    return min(collectives.all_objects(size))
