"""``accel env``: print versions, devices and the config file, for a bug report."""

from __future__ import annotations

import os
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accel_callbacks import __version__
from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.terminal_text import printable
from loggers.redaction import redacted

PACKAGES = (
    "numpy",
    "fsspec",
    "safetensors",
    "PyYAML",
    "tensorboard",
    "wandb",
    "lightning-utilities",
    "transformers",
    "accelerate",
)
VARIABLES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "HF_HOME",
    "XDG_CACHE_HOME",
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_PROCID",
)
PREFIXES = ("ACCEL_", "NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_FR_")


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel env``."""
    parser.option("--short", action="store_true", help="versions only, without importing torch")
    parser.option("--config_file", metavar="FILE", help="the config file to show")


def run(args: Namespace) -> int:
    """Print a ``name: value`` line per fact, then the config file."""
    if args.short and args.config_file:
        raise CommandError("--short shows no config file: leave out --config_file, or --short")
    for name, value in _facts(short=args.short):
        print(f"- {name}: {printable(value)}")
    if not args.short:
        for line in _config_lines(args.config_file):
            print(line)
    return 0


def _config_lines(named: str | None) -> Iterator[str]:
    """Yield the config file that a launch from the working directory would read."""
    from accel_callbacks.launch.config_file import find_config, read_config

    try:
        path = named or find_config(None, os.environ)
    except ValueError as error:
        yield f"- Config file: cannot be found: {printable(str(error))}"
        return
    if path is None:
        yield "- Config file: none"
        return
    yield f"- Config file: {printable(str(path))}"
    try:
        yield from _indent(read_config(path))
    except (ValueError, OSError, ImportError) as error:
        yield f"  cannot be read: {printable(str(error))}"


def _indent(values: Mapping[str, Any], depth: int = 1) -> Iterator[str]:
    """Yield nested values without secrets."""
    for name, value in redacted(values).items():
        start = f"{'  ' * depth}- {printable(str(name))}:"
        if isinstance(value, Mapping) and value:
            yield start
            yield from _indent(value, depth + 1)
        else:
            yield f"{start} {printable(str(value))}"


def _facts(short: bool) -> Iterator[tuple[str, str]]:
    """Yield all facts in the order of output."""
    yield "accel-callbacks", __version__
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "Platform", platform.platform()
    yield "CPU count", str(os.cpu_count())
    yield "RAM", _memory()
    if short:
        yield "torch", _version("torch")
    else:
        yield from _torch_facts()
    for package in PACKAGES:
        yield package, _version(package)
    for name in sorted(os.environ):
        if name.startswith(PREFIXES) or name in VARIABLES:
            yield name, redacted(os.environ[name], name)


def _version(package: str) -> str:
    """Return the version of an installed distribution without importing it."""
    from importlib import metadata  # slow to import: completions load this module too

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    """Return the physical memory in GiB."""
    if sys.platform == "win32":
        return "unknown"
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    except (ValueError, OSError):
        return "unknown"


def _torch_facts() -> Iterator[tuple[str, str]]:
    """Yield what only torch knows; if it cannot be imported, the error: it may be the bug."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        yield "torch", f"{_version('torch')}, cannot be imported: {type(error).__name__}: {error}"
        return

    yield "torch", str(torch.__version__)
    yield "torch CUDA", str(torch.version.cuda)
    yield "Accelerator devices", _or_error(_devices)
    if torch.version.cuda is not None:
        yield from _nvidia_facts()
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    checks = ((name, getattr(dist, f"is_{name}_available", None)) for name in names)
    present = [name for name, check in checks if check is not None and check()]
    yield "Distributed backends", ", ".join(present) or "none"


def _or_error(fact: Callable[[], str]) -> str:
    """Return a fact, or the error of the driver, which may be the bug that is reported."""
    try:
        return fact()
    except Exception as error:
        return f"cannot be read: {type(error).__name__}: {error}"


def _nvidia_facts() -> Iterator[tuple[str, str]]:
    """Yield the driver and NCCL."""
    from accel_callbacks.launch.machine import gpu_drivers

    drivers = dict.fromkeys(gpu.driver for gpu in gpu_drivers(os.environ) if gpu.driver)
    yield "NVIDIA driver", ", ".join(drivers) or "unknown: nvidia-smi has no answer"
    yield "NCCL", _or_error(_nccl_version)


def _nccl_version() -> str:
    """Return the version of the NCCL that torch was built with."""
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "not in this torch"
    from torch.cuda import nccl

    version: Any = nccl.version
    return ".".join(map(str, version()))


def _devices() -> str:
    """Describe the accelerators, with names, memory and compute capability for CUDA."""
    import torch

    if not torch.accelerator.is_available():
        return "none"
    count, kind = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
    label = kind.type if kind is not None else "unknown"
    if label != "cuda":
        return f"{count} x {label}"
    known = map(torch.cuda.get_device_properties, range(count))
    return "; ".join(
        f"cuda:{i} {p.name} {p.total_memory / 2**30:.1f} GiB, capability {p.major}.{p.minor}"
        for i, p in enumerate(known)
    )
