"""Dumps of torch's flight recorder: what each rank's NCCL has done last."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

__all__ = ["dump_hang"]

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # since 2.10, and before


def dump_hang(rank: int, env: Mapping[str, str] | None = None) -> str:
    """Write this rank's dump, and return a sentence that says where it is.

    torch writes dumps when its own watchdog finds a timeout, which an abort of the run forestalls.

    Args:
        rank: of this process.
        env: the environment variables; those of this process if None.

    Returns:
        The sentence with a space before it; empty where no variable names a place for dumps, or
        nothing was recorded.
    """
    prefix = _prefix(os.environ if env is None else env)
    if prefix is None:
        return ""
    path = f"{prefix}{rank}"
    with suppress(Exception):  # a full disk must not keep the run from its abort
        if not os.path.exists(path) and (recorded := _read_recording()):
            with open(path, "xb") as out:
                out.write(recorded)
    if not os.path.exists(path):
        return ""
    folder, name = os.path.split(prefix)
    return f" What NCCL did last is in {prefix}*: torchfrtrace {folder or '.'} -p {name}"


def _prefix(env: Mapping[str, str]) -> str | None:
    """Return the path to which each rank is appended, None if no place was named."""
    if next((env[name] for name in _SIZES if name in env), "1") == "0":
        return None
    return next((env[name] for name in _PREFIXES if env.get(name)), None)


def _read_recording() -> bytes:
    """Return what torch has recorded; empty without NCCL, as in a torch for the CPU."""
    dump: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace", None)
    return b"" if dump is None else dump()
