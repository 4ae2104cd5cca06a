"""Detect the GPUs, cores, memory and SLURM job of this machine without importing torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "DRIVERS",
    "GpuDriver",
    "Machine",
    "detect_machine",
    "gpu_drivers",
    "has_driver",
    "nvidia_smi",
    "usable_cores",
]

#: For each distributed type, prefixes of the driver's device files, those of Jetson and WSL too.
DRIVERS = {
    "MULTI_GPU": ("nvidia", "nvhost", "nvgpu", "nvmap", "dxg", "kfd"),
    "MULTI_XPU": ("dri", "dxg"),
    "MULTI_NPU": ("davinci",),
    "MULTI_MLU": ("cambricon",),
    "MULTI_SDAA": ("tcaicard",),
    "MULTI_MUSA": ("mtgpu",),
    "MULTI_HPU": ("hl", "accel"),
    "MULTI_NEURON": ("neuron",),
}
_SMI_SECONDS = 10.0  # nvidia-smi hangs if the driver does
_SMI_CHARACTERS = 100_000
_SLURM = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


@dataclass(frozen=True)
class GpuDriver:
    """An NVIDIA GPU and the version of its driver, as nvidia-smi names them."""

    name: str
    driver: str


@dataclass(frozen=True)
class Machine:
    """The hardware of one machine.

    Args:
        gpus: names of the visible GPUs.
        gpu_kind: ``"cuda"``, ``"rocm"``, ``"mps"`` or empty.
        cores: cores that this process may use.
        memory: bytes of main memory; 0 if unknown.
        slurm_nodes: machines of the surrounding SLURM job; 0 outside of one.
    """

    gpus: tuple[str, ...] = ()
    gpu_kind: str = ""
    cores: int = 1
    memory: int = 0
    slurm_nodes: int = 0

    def lines(self) -> list[str]:
        """Return lines that describe the machine."""
        names = ", ".join(dict.fromkeys(self.gpus))
        memory = f", {self.memory / 2**30:.1f} GiB of memory" if self.memory else ""
        lines = [f"GPUs: {len(self.gpus)} ({names})" if self.gpus else "GPUs: none"]
        lines.append(f"CPU: {self.cores} {'core' if self.cores == 1 else 'cores'}{memory}")
        if self.slurm_nodes:
            lines.append(f"SLURM: a job on {self.slurm_nodes} machine(s)")
        return lines


def detect_machine(environment: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Detect the hardware of this machine; anything that cannot be determined counts as absent.

    Args:
        environment: usually ``os.environ``.
        root: parent folder of ``/dev``, ``/proc`` and ``/sys``.
    """
    kind, names = _gpus(environment, root)
    return Machine(
        gpus=_visible(names, environment),
        gpu_kind=kind,
        cores=usable_cores(),
        memory=_memory(),
        slurm_nodes=_slurm_nodes(environment),
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use, which may be a subset of all."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_driver(kind: str, root: Path = Path("/")) -> bool:
    """Return whether the driver of a distributed type has device files; True if unknown."""
    if sys.platform != "linux" or kind not in DRIVERS:
        return True
    return any(path.name.startswith(DRIVERS[kind]) for path in _list_folder(root / "dev"))


def _gpus(environment: Mapping[str, str], root: Path) -> tuple[str, tuple[str, ...]]:
    is_apple = sys.platform == "darwin" and platform.machine() == "arm64"
    for kind, names in (
        ("cuda", _nvidia_smi(environment) or _nvidia_files(root)),
        ("rocm", _amd_files(root)),
        ("mps", ("Apple GPU",) if is_apple else ()),
    ):
        if names:
            return kind, names
    return "", ()


def gpu_drivers(environment: Mapping[str, str]) -> tuple[GpuDriver, ...]:
    """Return the NVIDIA GPUs of this machine; empty if nvidia-smi has no answer."""
    lines = nvidia_smi(environment, "--query-gpu=name,driver_version", "--format=csv,noheader")
    pairs = (line.rpartition(",") for line in lines)
    return tuple(GpuDriver(_clean(name), _clean(driver)) for name, _, driver in pairs if name)


def nvidia_smi(
    environment: Mapping[str, str], *words: str, timeout: float | None = None
) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it is absent, fails or hangs as drivers do.

    Args:
        environment: its ``PATH`` is searched.
        words: arguments.
        timeout: in seconds, 10 by default.
    """
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if tool is None:
        return []
    limit = _SMI_SECONDS if timeout is None else timeout
    try:
        done = subprocess.run(
            [tool, *words],
            capture_output=True,
            text=True,
            timeout=limit,
            check=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in done.stdout[:_SMI_CHARACTERS].splitlines() if line.strip()]


def _nvidia_smi(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Query the names of the GPUs."""
    lines = nvidia_smi(environment, "--query-gpu=name", "--format=csv,noheader")
    return tuple(_clean(line) for line in lines)


def _nvidia_files(root: Path) -> tuple[str, ...]:
    names = []
    for folder in _list_folder(root / "proc/driver/nvidia/gpus"):
        lines = _text_of(folder / "information").splitlines()
        model = [line.partition(":")[2] for line in lines if line.startswith("Model:")]
        names.append(_clean(model[0]) if model else "NVIDIA GPU")
    return tuple(names)


def _amd_files(root: Path) -> tuple[str, ...]:
    """List the nodes of the kernel's compute driver that have SIMD units; the others are CPUs."""
    names = []
    for folder in _list_folder(root / "sys/class/kfd/kfd/topology/nodes"):
        lines = _text_of(folder / "properties").splitlines()
        facts = dict(line.split(maxsplit=1) for line in lines if len(line.split()) > 1)
        if facts.get("simd_count", "0").strip() != "0":
            names.append(_clean(_text_of(folder / "name")) or "AMD GPU")
    return tuple(names)


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text_of(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(10_000)
    except OSError:
        return ""


def _clean(text: str) -> str:
    return "".join(c for c in text if c.isprintable()).strip()[:80]


def _visible(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a process sees; as in CUDA, an invalid index hides those after it."""
    text = environment.get("CUDA_VISIBLE_DEVICES", environment.get("HIP_VISIBLE_DEVICES"))
    if text is None or not names:
        return names
    seen: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word.isdecimal() and len(word) < 6 and int(word) < len(names):
            seen.append(names[int(word)])
        elif word.startswith(("GPU-", "MIG-")):
            seen.append(names[0])
        else:
            break
    return tuple(seen)


def _memory() -> int:
    if sys.platform != "win32":
        with suppress(ValueError, OSError):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _slurm_nodes(environment: Mapping[str, str]) -> int:
    if "SLURM_JOB_ID" not in environment:
        return 0
    texts = [environment[name] for name in _SLURM if name in environment]
    number = texts[0] if texts else "1"
    return int(number) if number.isdecimal() and len(number) < 8 else 1
