"""Rank-aware output: loggers and progress bars."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.topology import process_rank
from accel_callbacks.errors import nearest

__all__ = ["MultiProcessAdapter", "get_logger", "tqdm"]

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return ``tqdm.auto.tqdm``, displayed only by the first process of each machine.

    Args:
        *args: of tqdm, the iterable first.
        main_process_only: hide the bar on the other processes, on by default; they still iterate.
        **kwargs: of tqdm.

    Raises:
        TypeError: the first argument is a boolean instead of an iterable.
        ImportError: tqdm is not installed.

    Example:
        >>> import os
        >>> from accel_callbacks import tqdm
        >>> with open(os.devnull, "w") as nowhere:
        ...     sum(tqdm(range(4), file=nowhere))
        6
    """
    if args and isinstance(args[0], bool):
        raise TypeError(
            f"tqdm({args[0]}, ...): the iterable comes first; give the flag by name, "
            f"main_process_only={args[0]}."
        )
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise ImportError("the progress bar needs tqdm: pip install tqdm") from error
    if main_process_only and process_rank()[2] != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # Python 3.10 has no type parameters there
    _Adapter = logging.LoggerAdapter


class MultiProcessAdapter(_Adapter):
    """A logger whose methods take ``main_process_only`` and ``in_order``; see :func:`get_logger`.

    Messages that are not restricted to the main process start with ``[RANK n]``.

    Args:
        logger: the underlying logger.
        extra: attributes for each record, as in :class:`logging.LoggerAdapter`.

    Example:
        >>> import logging
        >>> from accel_callbacks import MultiProcessAdapter
        >>> logger = MultiProcessAdapter(logging.getLogger("train"))
        >>> logger.info("loaded", main_process_only=False)
    """

    def __init__(self, logger: logging.Logger, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logger, extra)
        self._warned: set[str] = set()

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a record; all other methods (``info``, ``warning``, ...) call this one.

        Args:
            level: of the record, such as ``logging.INFO``.
            msg: the message, with ``%`` placeholders for ``args``.
            *args: the values of the placeholders.
            **kwargs: ``main_process_only`` (on by default, off with ``in_order``) logs on rank 0
                only. ``in_order=True`` logs on one rank after the other; all ranks must make the
                call, whatever their level. The rest is passed to :meth:`logging.Logger.log`.

        Raises:
            RemoteError: with ``in_order``, on all ranks but the one whose logging failed.
        """
        in_order = kwargs.pop("in_order", False)
        main_only = kwargs.pop("main_process_only", not in_order)
        if not in_order and not self.isEnabledFor(level):
            return
        rank, world = process_rank()[:2]
        if main_only and rank != 0:
            return
        with _in_turn() if in_order and not main_only else nullcontext():
            if not main_only and world > 1:
                msg = f"[RANK {rank}] {msg}"
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line
            msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
            self.logger.log(level, msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the adapter's ``extra`` to the call's own."""
        if self.extra:
            kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning once per adapter for the same message and args.

        Example:
            >>> from accel_callbacks import get_logger
            >>> logger = get_logger("train")
            >>> logger.warning_once("this is slow")
            >>> logger.warning_once("this is slow")
        """
        key = repr((msg, args))
        if key in self._warned:
            if kwargs.get("in_order") and not kwargs.get("main_process_only"):
                with _in_turn():  # another rank may log it for the first time, and needs this one
                    return
            return
        self._warned.add(key)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.log(logging.WARNING, msg, *args, **kwargs)


@contextmanager
def _in_turn() -> Iterator[None]:
    """Context manager: run the block on one rank after the other; an error is raised on all."""
    rank, world = collectives.rank(), collectives.world_size()
    # Rank r waits at r barriers before its turn and at world - 1 - r after it, so that each rank
    # passes world - 1 of them.
    with shared_failure("logging in order"):
        for _ in range(rank):
            collectives.barrier()
        try:
            yield
        finally:
            for _ in range(rank, world - 1):
                collectives.barrier()


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return a logger for scripts that run on several processes.

    It can be made before any Accelerator exists. It sets the level of this logger only, never that
    of the root logger.

    Args:
        name: as for :func:`logging.getLogger`, usually ``__name__``.
        log_level: the lowest level to log, such as ``"INFO"`` or ``logging.INFO``. If ``None``,
            the environment variable ``ACCEL_LOG_LEVEL``, else the level that the logger has.

    Raises:
        ValueError: the level does not exist.

    Example:
        >>> from accel_callbacks import get_logger
        >>> logger = get_logger(__name__, log_level="INFO")
        >>> logger.info("starting")  # once
        >>> logger.info("my share", main_process_only=False)  # each process, in any order
        >>> logger.info("my share", in_order=True)  # each process in turn
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(_level(log_level, "log_level"))
    elif os.environ.get("ACCEL_LOG_LEVEL"):
        logger.setLevel(_level(os.environ["ACCEL_LOG_LEVEL"], "ACCEL_LOG_LEVEL"))
    return MultiProcessAdapter(logger)


def _level(level: str | int, origin: str) -> int:
    """Return the number of a level given by name (in either case) or by number."""
    number = logging.getLevelName(level.upper()) if isinstance(level, str) else level
    if not isinstance(number, int):
        hint = nearest(str(level).upper(), _LEVELS)
        raise ValueError(f"{origin}={level!r} is unknown; use one of {_LEVELS}.{hint}")
    return number


def notice(text: str) -> None:
    """Print one line for the user on rank 0, to stderr, apart from the output of the script.

    A terminal has it in as many lines as it takes, broken at words.

    Args:
        text: the line, without a newline.
    """
    if process_rank()[0] == 0:
        from accel_callbacks.terminal_text import wrapped  # most runs have nothing to say

        print(wrapped(f"[accel] {text}", sys.stderr), file=sys.stderr, flush=True)
