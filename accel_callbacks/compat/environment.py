"""Names of ``accelerate.utils.environment``: variables, devices and this machine."""

from __future__ import annotations

import functools
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks.distributed.topology import own_accelerator
from accel_callbacks.launch.environment import changed_environment
from accel_callbacks.launch.machine import gpu_drivers, nvidia_smi
from accel_callbacks.launch.peer_access import nccl_workarounds
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

__all__ = [
    "CPUInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "check_os_kernel",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_free_port",
    "get_gpu_info",
    "get_int_from_env",
    "is_port_in_use",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "str_to_bool",
]

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_FORBIDDEN = frozenset(";\n<> ")  # in lines of an environment file
_PREFIX = "ACCELERATE_"
_DEBUG = "ACCEL_DEBUG"
_PURGES = "_accelerate_is_purged_environment_wrapped"
_FIRST_FP8 = (8, 9)
_FIRST_KERNEL = (5, 5)

# Each number of a process, by the variables of torch's launcher, Intel MPI, Open MPI and MVAPICH.
_MPI_VARIABLES = {
    "rank": ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "world_size": ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "local_rank": (
        *("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "MV2_COMM_WORLD_LOCAL_RANK",
    ),
    "local_world_size": (
        *("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
}


# --- values of variables ----------------------------------------------------------------------


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for a text that means yes, 0 for one that means no.

    Args:
        value: the text, in any case.
        to_bool: return True or False instead.

    Raises:
        ValueError: it means neither.
    """
    text = value.lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"invalid truth value {value}: use one of {sorted(_TRUE | _FALSE)}.")
    return text in _TRUE if to_bool else int(text in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether a variable means yes; the default without it."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of a variable; the default without it."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the first of some variables that is a number of at least 0; the default without it."""
    numbers = (int(os.environ.get(key, -1)) for key in env_keys)
    return next((number for number in numbers if number >= 0), default)


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return the lines of an environment file, without values that such a file cannot have.

    Warns:
        UserWarning: there are such values; it names their variables.
    """
    usable = {
        key: value
        for key, value in current_env.items()
        if key and value and _FORBIDDEN.isdisjoint(key + value)
    }
    if lost := [key for key in current_env if key not in usable]:
        # Not the values, which may be secrets.
        warn(
            f"the environment file is without {listed(map(repr, lost))}: its lines have no empty "
            "values, spaces, line breaks, semicolons, < or >. Set them on the other machines."
        )
    return [f"{key}={value}\n" for key, value in usable.items()]


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of some libraries that are imported already."""
    return [name for name in library_names if name in sys.modules]


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether something listens on a port of this machine, 29500 by default."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


# --- the variables of a block -----------------------------------------------------------------


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables, named in upper case, for a block; restore these afterwards.

    Args:
        **kwargs: values by name, of which the text is set.
    """
    variables = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all variables for a block; restore the whole environment afterwards."""
    with changed_environment({}):
        os.environ.clear()
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or the tests of a class, to leave ``ACCELERATE_`` variables alone.

    Args:
        func_or_cls: a function, or a class of which the methods named ``test...`` are wrapped,
            those of its subclasses too.
    """
    if not isinstance(func_or_cls, type):
        return _restore_after(func_or_cls)

    def wrap_tests(cls: type[Any]) -> None:
        for name in dir(cls):
            method = getattr(cls, name)
            if name.startswith("test") and callable(method) and not hasattr(method, _PURGES):
                setattr(cls, name, _restore_after(method))

    wrap_tests(func_or_cls)
    subclass = classmethod(lambda cls, **options: wrap_tests(cls))
    func_or_cls.__init_subclass__ = subclass  # type: ignore[assignment]
    return func_or_cls


def _restore_after(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def purged(*args: Any, **kwargs: Any) -> Any:
        before = dict(os.environ)
        try:
            return function(*args, **kwargs)
        finally:
            names = {*before, *os.environ}
            _restore({name: before.get(name) for name in names if name.startswith(_PREFIX)})

    setattr(purged, _PURGES, True)
    return purged


_first_debug: list[str | None] = []  # the variable before a script has set it


def set_debug(debug: bool | None) -> None:
    """Let ranks compare what they hold before each collective, or not; None undoes it."""
    if not _first_debug:
        _first_debug.append(os.environ.get(_DEBUG))
    if debug is None:
        _restore({_DEBUG: _first_debug.pop()})
    else:
        os.environ[_DEBUG] = str(int(debug))


def _restore(before: Mapping[str, str | None]) -> None:
    """Set variables to values that they had, None for those that were not set."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# --- processes and devices --------------------------------------------------------------------


@dataclass
class CPUInformation:
    """Ranks of a process on a CPU, and how many there are."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the ranks that the launcher or MPI has given this process."""
    alone = CPUInformation()
    return CPUInformation(
        **{key: get_int_from_env(names, vars(alone)[key]) for key, names in _MPI_VARIABLES.items()}
    )


def get_current_device_type() -> tuple[str, str]:
    """Return the type of this machine's accelerator, and of a run on several of them.

    CUDA where torch sees none.
    """
    device = own_accelerator()
    kind = "cuda" if device is None or device.type == "mps" else device.type
    return kind, "MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the NVIDIA GPUs of this machine, and how many there are."""
    names = [gpu.name for gpu in gpu_drivers(os.environ)]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver.

    Raises:
        FileNotFoundError: nvidia-smi is absent or finds no GPU.
    """
    gpus = gpu_drivers(os.environ)
    if not gpus:
        raise FileNotFoundError("nvidia-smi is absent, or shows no GPU: install NVIDIA's driver.")
    return gpus[0].driver


def check_cuda_p2p_ib_support() -> bool:
    """Return False where NCCL must not use peer access between this machine's GPUs."""
    return not nccl_workarounds(gpu_drivers(os.environ), {})


def check_cuda_fp8_capability() -> bool:
    """Return whether the first NVIDIA GPU of this machine has fp8."""
    lines = nvidia_smi(os.environ, "--query-gpu=compute_cap", "--format=csv,noheader")
    if lines:
        return tuple(int(part) for part in lines[0].strip().split(".")) >= _FIRST_FP8
    return torch.cuda.get_device_capability() >= _FIRST_FP8


def get_free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def check_os_kernel() -> None:
    """Warn where the kernel is a Linux before 5.5, under which processes may hang."""
    machine = platform.uname()
    version = re.match(r"(\d+)\.(\d+)", machine.release)
    if machine.system == "Linux" and version and tuple(map(int, version.groups())) < _FIRST_KERNEL:
        warn(f"Linux {machine.release} is older than 5.5.0, and processes may hang: update it.")
