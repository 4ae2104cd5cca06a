"""What may explain a difference between two runs: script, versions, options, hardware, commit."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import xxhash

__all__ = ["process_began", "start_facts"]

_PACKAGES = (
    *("accel-callbacks", "torch", "numpy", "triton", "transformers", "datasets", "tokenizers"),
    *("peft", "trl", "deepspeed", "safetensors", "torchvision", "torchaudio", "flash-attn"),
)
# Variables that change what is computed, or where.
_STARTS = ("ACCEL_", "CUDA_", "CUBLAS_", "NCCL_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "HIP_")
_NAMES = ("PYTHONHASHSEED", "ATEN_CPU_CAPABILITY", "HF_HOME", "HF_DATASETS_CACHE")
_PATIENCE = 10.0  # seconds for one command of git
_MOST_MODULES = 1000  # of the script, whose text is digested


def start_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a start, secrets included: the journal leaves them out as it writes.

    Args:
        facts: what only the run knows, such as its config.
    """
    return {
        **facts,
        "argv": list(sys.argv),
        "command": list(sys.orig_argv),
        "cwd": os.getcwd(),
        "script": _script(),
        "versions": _versions(),
        "environment": _environment(),
        "environment_names": sorted(os.environ),
        "numerics": _numerics(),
        "hardware": _hardware(),
        "git": _git(),
    }


def process_began() -> float:
    """Return when this process was started, in Unix seconds; where that is unknown, now."""
    now = time.time()
    if sys.platform != "linux":
        return now
    try:
        stat = Path("/proc/self/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return now
    return now - uptime + ticks / float(os.sysconf("SC_CLK_TCK"))


def _script_path() -> str | None:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if path is None else os.path.abspath(path)


def _script() -> dict[str, Any]:
    """Return the path of the script, and digests of it and of the modules that lie below it."""
    path = _script_path()
    if path is None:
        return {}
    digests = {name: _digest(file) for name, file in _modules_below(os.path.dirname(path), path)}
    return {"path": path, "digest": _digest(path), **digests}


def _modules_below(folder: str, script: str) -> list[tuple[str, str]]:
    """Return name and path of the modules that the script has imported from its own folder."""
    files = {getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()]}
    paths = sorted(os.path.abspath(file) for file in files if isinstance(file, str))
    own = [
        path
        for path in paths
        if path.startswith(folder + os.sep) and path.endswith(".py") and path != script
    ]
    named = ((os.path.relpath(path, folder), path) for path in own)
    # An environment may lie in the folder of a project.
    return [pair for pair in named if "site-packages" not in pair[0]][:_MOST_MODULES]


def _digest(path: str) -> str | None:
    try:
        return xxhash.xxh3_128_hexdigest(Path(path).read_bytes())
    except OSError:
        return None


@functools.cache  # a look at all installed packages takes longer than a short run
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions["cuda"] = str(torch.version.cuda)
    cudnn: Any = torch.backends.cudnn
    if cudnn.is_available():
        versions["cudnn"] = str(cudnn.version())
    return versions


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_STARTS) or name in _NAMES
    }


def _numerics() -> dict[str, Any]:
    """Return the switches of torch on which bits depend."""
    cudnn = torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": cudnn.deterministic,
        "cudnn_benchmark": cudnn.benchmark,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
    }


def _hardware() -> dict[str, Any]:
    devices, cuda = [], torch.cuda
    initialized: Any = cuda.is_initialized
    if cuda.is_available() and initialized():
        devices = [cuda.get_device_name(index) for index in range(cuda.device_count())]
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "devices": devices,
    }


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _git() -> dict[str, Any]:
    """Return the commit of the script's repository, and a digest of what differs from it."""
    folder = Path(_script_path() or os.getcwd()).parent
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return {}
    try:
        commit = _run_git(folder, "rev-parse", "HEAD").decode().strip()
        difference = _run_git(folder, "diff", "--no-ext-diff", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return {}
    digest = xxhash.xxh3_128_hexdigest(difference) if difference else None
    return {"commit": commit, "diff": digest}


def _run_git(folder: Path, *words: str) -> bytes:
    command = ["git", "-C", str(folder), *words]
    # Locks nothing: the run is not to disturb a repository that somebody works in.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(
        command, capture_output=True, timeout=_PATIENCE, check=True, env=environment
    )
    return done.stdout
