"""Which process does what: decorators, ordering, and blocks that cannot leave a rank waiting."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, ParamSpec, TypeVar, overload

from accel_callbacks import collectives
from accel_callbacks.distributed.failures import share_failure
from accel_callbacks.distributed.topology import process_rank
from accel_callbacks.splitting import split_between_processes
from accel_callbacks.turns import local_main_process_first, main_process_first

__all__ = [
    "ProcessControl",
    "is_main_process",
    "last_process_only",
    "local_main_process_first",
    "local_main_process_only",
    "main_process_first",
    "main_process_only",
    "on_local_process",
    "on_process",
    "synchronize",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _only(
    function: Callable[P, R], chosen: Callable[[tuple[int, int, int, int]], bool]
) -> Callable[P, R | None]:
    """Call ``function`` where ``chosen`` holds, decided at each call; elsewhere return None."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if chosen(process_rank()) else None

    return guarded


def main_process_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: run the function on rank 0 only; the others get ``None`` at once.

    It is decided at each call, so functions can be decorated before any Accelerator exists.

    Example:
        >>> from accel_callbacks import main_process_only
        >>> @main_process_only
        ... def report(accuracy: float) -> str:
        ...     return f"accuracy {accuracy:.1%}"
        >>> report(0.97)
        'accuracy 97.0%'
    """
    return _only(function, lambda ranks: ranks[0] == 0)


def local_main_process_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: run the function on the first process of each machine only.

    Example:
        >>> from accel_callbacks import local_main_process_only
        >>> local_main_process_only(lambda: "downloaded")()
        'downloaded'
    """
    return _only(function, lambda ranks: ranks[2] == 0)


def last_process_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: run the function on the highest rank only.

    Example:
        >>> from accel_callbacks import last_process_only
        >>> last_process_only(lambda: "me")()
        'me'
    """
    return _only(function, lambda ranks: ranks[0] == ranks[1] - 1)


def on_process(
    function: Callable[P, R] | None = None, process_index: int = 0
) -> Callable[..., Any]:
    """Decorator: run the function on the process with this rank only.

    Args:
        function: the function, or ``None`` where the decorator is called with arguments.
        process_index: the rank that runs it.

    Example:
        >>> from accel_callbacks import on_process
        >>> @on_process(process_index=0)
        ... def first() -> str:
        ...     return "rank 0"
        >>> first()
        'rank 0'
    """
    if function is None:
        return functools.partial(on_process, process_index=process_index)
    return _only(function, lambda ranks: ranks[0] == process_index)


def on_local_process(
    function: Callable[P, R] | None = None, local_process_index: int = 0
) -> Callable[..., Any]:
    """Decorator: run the function on the process with this index on each machine only.

    Example:
        >>> from accel_callbacks import on_local_process
        >>> on_local_process(lambda: "here", local_process_index=0)()
        'here'
    """
    if function is None:
        return functools.partial(on_local_process, local_process_index=local_process_index)
    return _only(function, lambda ranks: ranks[2] == local_process_index)


@overload
def synchronize(name: str = ...) -> _Meeting: ...
@overload
def synchronize(name: Callable[P, R]) -> Callable[P, R]: ...
def synchronize(name: Any = "synchronize") -> Any:
    """Context manager and decorator: processes meet before and after the block, or all fail.

    Use it around work that one process does for all. An exception in the block on any process
    ends the block on all of them: the failing one raises its own exception, the others raise
    :class:`RemoteError` with its traceback, and nobody waits for a process that is gone.

    Args:
        name: shown in the error, to tell several blocks apart.

    Raises:
        RemoteError: another process failed in the block.

    Example:
        >>> from accel_callbacks import is_main_process, synchronize
        >>> with synchronize("prepare data"):
        ...     if is_main_process():
        ...         print("unpacking")
        unpacking
        >>> @synchronize
        ... def fetch() -> int:
        ...     return 3
        >>> fetch()
        3
    """
    if callable(name):
        return _Meeting(getattr(name, "__qualname__", "synchronize"))(name)
    return _Meeting(name)


class _Meeting(ContextDecorator):
    """The block of :func:`synchronize`; it keeps no state, so one object serves many calls."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        collectives.barrier()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        share_failure(error, self._name)


def is_main_process() -> bool:
    """True on rank 0; works before any Accelerator exists.

    Example:
        >>> from accel_callbacks import is_main_process
        >>> is_main_process()
        True
    """
    return process_rank()[0] == 0


class ProcessControl:
    """The process methods that Accelerator and PartialState share."""

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return process_rank()[1]

    @property
    def process_index(self) -> int:
        """Rank of this process, from 0."""
        return process_rank()[0]

    @property
    def local_process_index(self) -> int:
        """Index of this process on its machine, from 0."""
        return process_rank()[2]

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on the first process of each machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True on the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """True with more than one process."""
        return self.num_processes > 1

    main_process_only = staticmethod(main_process_only)
    on_main_process = staticmethod(main_process_only)
    local_main_process_only = staticmethod(local_main_process_only)
    on_local_main_process = staticmethod(local_main_process_only)
    on_last_process = staticmethod(last_process_only)
    on_process = staticmethod(on_process)
    on_local_process = staticmethod(on_local_process)
    main_process_first = staticmethod(main_process_first)
    local_main_process_first = staticmethod(local_main_process_first)
    synchronize = staticmethod(synchronize)

    @property
    def debug(self) -> bool | None:
        """Whether processes compare before a collective; None for what ``ACCEL_DEBUG`` says."""
        return None

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        collectives.barrier(debug=self.debug)

    def split_between_processes(
        self, inputs: T, apply_padding: bool = False
    ) -> AbstractContextManager[T]:
        """This process's share of ``inputs``; see :func:`accel_callbacks.split_between_processes`.

        Example:
            >>> from accel_callbacks import PartialState
            >>> with PartialState(cpu=True).split_between_processes(["a", "b"]) as prompts:
            ...     print(prompts)
            ['a', 'b']
        """
        return split_between_processes(inputs, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each machine only."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)
