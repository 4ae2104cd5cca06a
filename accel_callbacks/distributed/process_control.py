"""Run code on some ranks only, on one rank first, or on each rank's share of the inputs.

Everything here asks for the rank at each call, so that it works before any Accelerator exists and
the decorators can be used at import time.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch

from accel_callbacks import collectives
from accel_callbacks.collectives import map_leaves
from accel_callbacks.collectives.sharded import on_subset
from accel_callbacks.distributed.failures import share_failure, shared_failure
from accel_callbacks.distributed.topology import Ranks, process_rank

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
    "split_between_processes",
    "synchronize",
]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


def is_main_process() -> bool:
    """True on rank 0; works before any Accelerator exists.

    Example:
        >>> from accel_callbacks import is_main_process
        >>> is_main_process()
        True
    """
    return process_rank().rank == 0


def main_process_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: run the function on rank 0 only; the other ranks return ``None`` at once.

    The rank is read at each call, so functions can be decorated before any Accelerator exists. A
    forward of a sharded model in it would wait for the other ranks, and raises.

    Example:
        >>> from accel_callbacks import main_process_only
        >>> @main_process_only
        ... def report(accuracy: float) -> str:
        ...     return f"accuracy {accuracy:.1%}"
        >>> report(0.97)
        'accuracy 97.0%'
    """
    return _only(function, "main_process_only", lambda ranks: ranks.rank == 0)


def local_main_process_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: run the function on the first process of each machine only.

    Example:
        >>> from accel_callbacks import local_main_process_only
        >>> local_main_process_only(lambda: "downloaded")()
        'downloaded'
    """
    return _only(function, "local_main_process_only", lambda ranks: ranks.local_rank == 0)


def last_process_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: run the function on the highest rank only.

    Example:
        >>> from accel_callbacks import last_process_only
        >>> last_process_only(lambda: "me")()
        'me'
    """
    return _only(function, "last_process_only", lambda ranks: ranks.rank == ranks.world_size - 1)


def on_process(
    function: Callable[P, R] | None = None, process_index: int = 0
) -> Callable[..., Any]:
    """Decorator: run the function on one rank only.

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
    return _only(function, "on_process", lambda ranks: ranks.rank == process_index)


def on_local_process(
    function: Callable[P, R] | None = None, local_process_index: int = 0
) -> Callable[..., Any]:
    """Decorator: run the function on one local rank of each machine only.

    Example:
        >>> from accel_callbacks import on_local_process
        >>> on_local_process(lambda: "here", local_process_index=0)()
        'here'
    """
    if function is None:
        return functools.partial(on_local_process, local_process_index=local_process_index)
    return _only(
        function, "on_local_process", lambda ranks: ranks.local_rank == local_process_index
    )


def _only(
    function: Callable[P, R], decorator: str, chosen: Callable[[Ranks], bool]
) -> Callable[P, R | None]:
    """Call ``function`` on the ranks for which ``chosen`` is true; return None on the others."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        ranks = process_rank()
        if not chosen(ranks):
            return None
        count = ranks.local_world_size if "local" in decorator else ranks.world_size
        if count == 1:  # on all ranks
            return function(*args, **kwargs)
        with on_subset(f"{getattr(function, '__name__', 'a function')} ({decorator})"):
            return function(*args, **kwargs)

    return guarded


def main_process_first() -> AbstractContextManager[None]:
    """Context manager: rank 0 runs the block first, the other ranks after it has finished.

    All ranks leave the block together, after the last one has finished. An error on one rank is
    raised on all of them, so that no rank waits for one that is gone. A nested block follows the
    order of the outer one. A collective in the block would deadlock, and is refused, as is the
    forward of a sharded model.

    Raises:
        RemoteError: another rank failed in the block.
        RuntimeError: a collective in the block.

    Example:
        >>> from accel_callbacks import main_process_first
        >>> with main_process_first():
        ...     vocabulary = {"a": 0, "b": 1}
    """
    return _goes_first(process_rank().rank == 0, "main_process_first")


def local_main_process_first() -> AbstractContextManager[None]:
    """Context manager: the first process of each machine runs the block before the others.

    Otherwise like :func:`main_process_first`.

    Raises:
        RemoteError: another rank failed in the block.
        RuntimeError: a collective in the block.

    Example:
        >>> from accel_callbacks import local_main_process_first
        >>> with local_main_process_first():
        ...     cache = [1, 2]
    """
    return _goes_first(process_rank().local_rank == 0, "local_main_process_first")


@contextmanager
def _goes_first(leads: bool, block: str) -> Iterator[None]:
    """Run the block on the leading ranks, synchronize, run it on the others, synchronize."""
    if _is_nested(block):
        yield
        return
    # Each rank calls share_failure twice: a leader at the end of its block and then once more for
    # the followers' block; a follower once for the leaders' block and then at the end of its own.
    # So the calls pair up, and a failure in either half is raised on all ranks.
    if not leads:
        share_failure(None, block)
    with shared_failure(block), collectives.turn(block), _before_others(block):
        yield
    if leads:
        share_failure(None, block)


def _before_others(block: str) -> AbstractContextManager[None]:
    ranks = process_rank()
    local = block == "local_main_process_first"
    has_others = (ranks.local_world_size if local else ranks.world_size) > 1
    return on_subset(block) if has_others else nullcontext()


def _is_nested(block: str) -> bool:
    """Return True inside of another such block that puts the same ranks first."""
    outer = collectives.current_turn()
    ranks = process_rank()
    if outer not in (None, block) and ranks.local_world_size != ranks.world_size:
        raise RuntimeError(
            f"{block} inside of {outer} cannot be ordered on several machines: use the same one "
            "for both blocks, or put them one after the other."
        )
    return outer is not None


@overload
def synchronize(name: str = ...) -> _Synchronized: ...
@overload
def synchronize(name: Callable[P, R]) -> Callable[P, R]: ...
def synchronize(name: Any = "synchronize") -> Any:
    """Context manager and decorator: synchronize all ranks before and after the block.

    Use it around work that one rank does for all. An exception in the block on any rank is raised
    on all of them: the failing rank raises its own exception, the others raise
    :class:`RemoteError` with its traceback, and no rank waits for one that is gone.

    Args:
        name: shown in the error, to tell several blocks apart.

    Raises:
        RemoteError: another rank failed in the block.

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
        return _Synchronized(getattr(name, "__qualname__", "synchronize"))(name)
    return _Synchronized(name)


class _Synchronized(ContextDecorator):
    """The block of :func:`synchronize`; stateless, so that one object can serve many calls."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        collectives.barrier()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        share_failure(error, self._name)


@contextmanager
def split_between_processes(inputs: T, apply_padding: bool = False) -> Iterator[T]:
    """Context manager: yield this rank's share of ``inputs``, which are not changed.

    The shares are contiguous and in rank order; the first ones are longer by one if the number of
    items is not divisible by the number of ranks.

    Args:
        inputs: a list, a tuple, another sequence, a tensor or a NumPy array (split along its first
            dimension), a ``datasets.Dataset``, or a mapping of such values of the same length.
        apply_padding: repeat the last item, so that all ranks get the same number of items (to
            gather the results, for example; drop the repetitions afterwards).

    Yields:
        The share, of the same type as ``inputs``. With fewer items than ranks, the last ranks get
        none: an empty list, or a tensor of shape ``(0, ...)``.

    Raises:
        ValueError: the values of a mapping differ in length.
        TypeError: the inputs cannot be split, such as a string.

    Example:
        >>> from accel_callbacks import split_between_processes
        >>> with split_between_processes({"id": [1, 2], "prompt": ["a", "b"]}) as share:
        ...     print(share)
        {'id': [1, 2], 'prompt': ['a', 'b']}
    """
    rank, world = process_rank()[:2]
    length = _length(inputs)
    size, longer = divmod(length, world)
    start = rank * size + min(rank, longer)
    rows = list(range(start, start + size + (rank < longer)))
    if apply_padding and length:
        rows += [length - 1] * (size + (longer > 0) - len(rows))
    # Everything but a Mapping is a leaf here, so that map_leaves does not descend into lists.
    yield map_leaves(inputs, lambda items: _taker(items)(items, rows), _is_not_mapping)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        _taker(inputs)
        return len(inputs)
    lengths = {key: _length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the values must have the same length to be split, but have {lengths}.")
    return next(iter(lengths.values()), 0)


def _is_not_mapping(inputs: Any) -> bool:
    return not isinstance(inputs, Mapping)


def _taker(inputs: Any) -> Callable[[Any, list[int]], Any]:
    """Return the function that takes rows from inputs of this type."""
    for matches, take in _TAKERS:
        if matches(inputs):
            return take
    raise TypeError(
        f"a {type(inputs).__name__} cannot be split between processes: pass a list, a tuple, a "
        "tensor, an array, a datasets.Dataset, or a mapping of these."
    )


def _rows_of_tensor(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)]


def _rows_of_sequence(items: Sequence[Any], rows: list[int]) -> Any:
    taken = [items[row] for row in rows]
    if isinstance(items, tuple):
        return tuple(taken)
    if isinstance(items, list):
        return taken if type(items) is list else cast(Any, type(items))(taken)
    return taken


def _is_array(inputs: Any) -> bool:
    return hasattr(inputs, "__array__") and getattr(inputs, "ndim", 0) > 0


def _is_dataset(inputs: Any) -> bool:
    selects = callable(getattr(inputs, "select", None)) and hasattr(inputs, "__len__")
    return selects and not isinstance(inputs, torch.Tensor)


def _is_sequence(inputs: Any) -> bool:
    return isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes))


# The first match counts: a tensor has ``__array__`` too, and a DataFrame is an array with ``iloc``.
_TAKERS: tuple[tuple[Callable[[Any], bool], Callable[[Any, list[int]], Any]], ...] = (
    (_is_sequence, _rows_of_sequence),
    (lambda inputs: _is_array(inputs) and isinstance(inputs, torch.Tensor), _rows_of_tensor),
    (lambda inputs: hasattr(inputs, "iloc"), lambda frame, rows: frame.iloc[rows]),
    (_is_array, lambda array, rows: array[rows]),
    (_is_dataset, lambda dataset, rows: dataset.select(rows)),
)


class ProcessControl:
    """The rank properties and decorators that Accelerator and PartialState share."""

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return process_rank().world_size

    @property
    def process_index(self) -> int:
        """Rank of this process, from 0."""
        return process_rank().rank

    @property
    def local_process_index(self) -> int:
        """Index of this process on its machine, from 0."""
        return process_rank().local_rank

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
        """True if ranks compare their calls before a collective; None to read ``ACCEL_DEBUG``."""
        return None

    def wait_for_everyone(self) -> None:
        """Block until all ranks have reached this point.

        The hosts meet, over gloo: work that is queued on a device may still run. Accelerate's is a
        barrier of NCCL, which waits for that too; to measure time, synchronize the device before.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).wait_for_everyone()
        """
        collectives.barrier(debug=self.debug)

    def split_between_processes(
        self, inputs: T, apply_padding: bool = False
    ) -> AbstractContextManager[T]:
        """Yield this rank's share; see :func:`accel_callbacks.split_between_processes`.

        Example:
            >>> from accel_callbacks import PartialState
            >>> with PartialState(cpu=True).split_between_processes(["a", "b"]) as prompts:
            ...     print(prompts)
            ['a', 'b']
        """
        return split_between_processes(inputs, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on the first process of each machine only."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)
