"""``accel env``: what to paste in a report, versions and devices."""

from __future__ import annotations

import os
import platform
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib import metadata

from accel_callbacks import __version__
from accel_callbacks.cli.options import CommandParser

PACKAGES = (
    "numpy",
    "fsspec",
    "safetensors",
    "tensorboard",
    "wandb",
    "lightning-utilities",
)
VARIABLES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel env``."""
    parser.option("--short", action="store_true", help="versions only, without importing torch")


def run(args: Namespace) -> int:
    """Print one ``name: value`` line a fact."""
    for name, value in _facts(short=args.short):
        print(f"- {name}: {value}")
    return 0


def _facts(short: bool) -> Iterator[tuple[str, str]]:
    """All facts in the order they are printed."""
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
        if name.startswith("ACCEL_") or name in VARIABLES:
            yield name, os.environ[name]


def _version(package: str) -> str:
    """Version of an installed distribution, read without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    """Physical memory in GiB."""
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return "unknown"


def _torch_facts() -> Iterator[tuple[str, str]]:
    """What only torch itself can tell."""
    import torch
    import torch.distributed as dist

    yield "torch", str(torch.__version__)
    yield "torch CUDA", str(torch.version.cuda)
    yield "Accelerator devices", _devices()
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    checks = ((name, getattr(dist, f"is_{name}_available", None)) for name in names)
    present = [name for name, check in checks if check is not None and check()]
    yield "Distributed backends", ", ".join(present) or "none"


def _devices() -> str:
    """Accelerators by type, with names and memory where torch knows them."""
    import torch

    if not torch.accelerator.is_available():
        return "none"
    count, kind = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
    label = kind.type if kind is not None else "unknown"
    if label != "cuda":
        return f"{count} x {label}"
    known = map(torch.cuda.get_device_properties, range(count))
    return "; ".join(
        f"cuda:{i} {p.name} {p.total_memory / 2**30:.1f} GiB" for i, p in enumerate(known)
    )
