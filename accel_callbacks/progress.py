"""A progress bar that only one process of each machine shows."""

from __future__ import annotations

from typing import Any

from accel_callbacks.distributed.topology import process_rank

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, shown by the first process of each machine; it iterates on all.

    Args:
        *args: for tqdm, the iterable first.
        main_process_only: hide the bar on the other processes, on by default.
        **kwargs: for tqdm.

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
