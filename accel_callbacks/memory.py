"""Running out of memory: giving it back, and the search for a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import end_with, group_is_torn, watch_others
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.topology import own_accelerator, resolve_topology
from accel_callbacks.errors import RemoteError

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]

_PHRASES = (
    "out of memory",  # of CUDA, HIP, XPU, MPS, NCCL
    "can't allocate memory",  # of the CPU
    "not enough memory",  # of the CPU, on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN says of a batch too large for it
    "PT_DEVMEM Allocation failed",  # of HPU
)
_WHERE = "find_executable_batch_size"
_VERDICT = "attempt"


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an exception says that memory ran out, here or on the process it came from.

    Example:
        >>> from accel_callbacks.memory import should_reduce_batch_size
        >>> should_reduce_batch_size(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."))
        True
        >>> should_reduce_batch_size(ValueError("out of range"))
        False
    """
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(exception, RemoteError):
        text = _last_words(str(exception))
        return "MemoryError" in text or any(phrase in text for phrase in _PHRASES)
    return isinstance(exception, RuntimeError) and any(p in str(exception) for p in _PHRASES)


def _last_words(report: str) -> str:
    """What a traceback as text says after its last line of code."""
    lines = report.rstrip().splitlines()
    code = [index for index, line in enumerate(lines) if line.startswith("  ")]
    return "\n".join(lines[code[-1] + 1 :] if code else lines)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give memory that torch keeps for later back to the device; on the CPU there is none.

    Args:
        garbage_collection: collect unreachable objects first, so that their memory is free.

    Example:
        >>> from accel_callbacks import clear_device_cache
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    kind = own_accelerator()
    if kind is not None:
        torch.get_device_module(kind).empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Collect what is unreachable, empty the device's cache, and return a None for each object.

    Assign the result to the names that still hold the objects, which frees them.

    Example:
        >>> import torch
        >>> from accel_callbacks import release_memory
        >>> model, batch = torch.nn.Linear(1, 1), torch.ones(1)
        >>> model, batch = release_memory(model, batch)
        >>> model is None and batch is None
        True
    """
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Decorator: call the function with a smaller batch size each time memory runs out.

    The function gets the batch size as its first argument. Each call begins with
    ``starting_batch_size``; what the function returns is returned.

    With several processes all must make the call, and they try the same size together: where
    memory runs out on one process, all retry with the next size, and any other error of one ends
    the search on all. The collectives that others wait in fail then, at once on gloo and within a
    second or two on NCCL, and the processes join a new process group for the next attempt. So make
    the Accelerator outside of the function, call :meth:`Accelerator.free_memory` first inside of
    it, and prepare everything anew; models and groups made outside do not outlive an attempt that
    failed. A process that makes no collective is heard at the end of its attempt.

    Args:
        function: the function, ``None`` where the decorator is called with arguments.
        starting_batch_size: the first size, 128 by default.
        reduce_batch_size_fn: gives the next size, from the one that failed or, as in Accelerate,
            from no argument; 0.9 times the size by default. The smallest of all processes counts.

    Raises:
        TypeError: the arguments do not fit; the batch size must be left out of the call.
        ValueError: ``reduce_batch_size_fn`` gave no smaller whole number.
        RuntimeError: the batch size has reached zero.
        RemoteError: an attempt has failed on another process, not for memory.

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
            if group_is_torn():
                resolve_topology(anew=True)  # joins anew, with all processes
            with shared_failure("reduce_batch_size_fn"):
                size = _reduced(reduce_batch_size_fn, size)
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
    """A call that passes the batch size too is the mistake that is made."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of functions written in C
        return
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        raise TypeError(
            f"{name}({', '.join(given)}): {error}. find_executable_batch_size passes the batch "
            f"size as the first argument of {name}{signature}; leave it out of the call."
        ) from None


def attempt(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, str | None]:
    """Collective: the result, or what was said when memory ran out on a process.

    Nothing of a failed attempt is held when this returns: its frames hold what fills the memory.
    """
    stop_watching = watch_others()
    try:
        result = function(size, *args, **kwargs)
        collectives.barrier()  # nobody has succeeded before all have
        return result, None
    except BaseException as error:
        problem = _settle(error)
    finally:
        stop_watching()
    _hear_verdicts()
    return None, problem


def _settle(error: BaseException) -> str:
    """Release the others, and return what was said if memory ran out; else raise."""
    cause = end_with(error, _WHERE)
    if should_reduce_batch_size(cause):
        _tell_verdict("")
        return (_last_words(str(cause)) or type(cause).__name__).splitlines()[0][:200]
    _tell_verdict(f"{type(cause).__name__}: {cause}")
    if cause is error:
        raise error
    raise cause from error


def _tell_verdict(failure: str) -> None:
    """Let the others know whether this process tries again: "" if it does."""
    if group_is_torn():
        with suppress(dist.DistError):  # the store is gone with the process that kept it
            collectives.store().set(f"{_VERDICT}/{collectives.rank()}", failure)


def _hear_verdicts() -> None:
    """Wait until all processes know how their attempt has ended.

    Raises:
        RemoteError: one has failed for another reason, and does not try again.
        RuntimeError: one has not ended its attempt in time.
    """
    if not group_is_torn():
        return
    store, waiting = collectives.store(), set(range(collectives.world_size()))
    timeout = store.timeout  # type: ignore[attr-defined]  # that of the process group
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        for rank in [one for one in waiting if store.check([f"{_VERDICT}/{one}"])]:
            waiting.discard(rank)
            failure = store.get(f"{_VERDICT}/{rank}").decode()
            if failure:
                raise RemoteError(rank=rank, where=_WHERE, details=failure)
        if waiting and time.monotonic() > deadline:
            raise RuntimeError(
                f"memory ran out, and processes {sorted(waiting)} have not ended their attempt "
                "within the timeout of the process group; give the first Accelerator a longer "
                "timeout= if they only compute."
            )
        time.sleep(0.02 if waiting else 0)


def _reduced(reduce: Callable[..., int] | None, size: int) -> int:
    """The next size to try.

    Raises:
        ValueError: it is not smaller, or no whole number.
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
    """Collective: the smallest size of all processes."""
    return min(collectives.all_objects(size))
