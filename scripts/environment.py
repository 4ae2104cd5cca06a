"""Make and fill .venv in the repository, on any system: ``python scripts/environment.py EXTRA...``.

ACCEL_TORCH  what to install as torch, for example ACCEL_TORCH="torch==2.13.0"
PYTHON       the interpreter to make the environment with
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
_CANDIDATES = "python3 python3.13 python3.12 python3.11 python3.10 python"
_IS_NEW = "import sys; sys.exit(sys.version_info < (3, 10))"


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"== {text}", flush=True)


def fail(text: str, advice: str = "") -> NoReturn:
    """End the script with an error, and with what to do about it."""
    print(f"error: {text}", file=sys.stderr)
    if advice:
        print(f"  what to do: {advice}", file=sys.stderr)
    sys.exit(1)


def step(title: str, advice: str, command: Sequence[str | Path]) -> None:
    """Run a command, with its time; fail with advice if it fails."""
    begin = time.monotonic()
    say(title)
    if subprocess.call([str(word) for word in command], cwd=ROOT):
        fail(f"failed: {title}", advice)
    say(f"{title}: done in {time.monotonic() - begin:.0f} s")


def set_up(*extras: str) -> None:
    """Make .venv with torch, the project (editable) and the packages of these extras."""
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    _make_venv()
    mark = _fingerprint()
    stamps = [VENV / f"accel-setup-{extra}" for extra in extras]
    listed = ",".join(extras)
    if all(stamp.is_file() and stamp.read_text("utf-8").strip() == mark for stamp in stamps):
        say(f"environment .venv is ready for [{listed}]")
        return
    torch = _torch_requirement()
    install = [PYTHON, "-m", "pip", "install", "-qq"]
    # The pip that comes with older Pythons takes many minutes to resolve the test packages.
    step("update pip", "check the network", [*install, "--upgrade", "pip"])
    step(
        f"install {torch} (the large one)",
        'check the network and the free disk space; another build: ACCEL_TORCH="torch==VERSION"',
        [*install, torch],
    )
    step(
        f"install the project with [{listed}]",
        "check the network, then run this again; to start afresh, remove the folder .venv",
        [*install, "-e", f"{ROOT}[{listed}]"],
    )
    # Last, so that an interrupted set-up is not taken for a finished one.
    for stamp in stamps:
        part = stamp.with_name(stamp.name + ".part")
        part.write_text(mark + "\n", encoding="utf-8")
        part.replace(stamp)


def _make_venv() -> None:
    """Make .venv; one that does not run any more is replaced."""
    if _runs(PYTHON, "-c", _IS_NEW) and _runs(PYTHON, "-m", "pip", "--version"):
        return
    given = os.environ.get("PYTHON")
    candidates = [given] if given else [sys.executable, *_CANDIDATES.split()]
    python = next((one for one in candidates if _runs(one, "-c", _IS_NEW)), None)
    if python is None:
        fail(
            f"no Python 3.10 or newer found (tried {', '.join(candidates)})",
            f"install one, or name it in the variable PYTHON, and run {sys.argv[0]} again",
        )
    version = _output(python, "--version")
    step(
        f"make the environment {VENV} with {version}",
        "on Debian and Ubuntu, install the package python3-venv; then run this again",
        [python, "-m", "venv", "--clear", VENV],
    )


def _runs(*command: str | Path) -> bool:
    nowhere = subprocess.DEVNULL
    try:
        return subprocess.call(list(map(str, command)), stdout=nowhere, stderr=nowhere) == 0
    except OSError:
        return False


def _output(*command: str | Path) -> str:
    return subprocess.check_output(list(map(str, command)), text=True).strip()


def _fingerprint() -> str:
    """Return what changes when .venv no longer fits: requirements, place, interpreter, torch."""
    version = _output(PYTHON, "-c", "import sys; print(sys.version)")
    parts = [version, str(ROOT), os.environ.get("ACCEL_TORCH", "")]
    digest = hashlib.sha256("\0".join(parts).encode())
    for name in ("setup.cfg", "pyproject.toml"):
        try:
            digest.update((ROOT / name).read_bytes())
        except OSError:
            fail(f"cannot read {name}", "run this script from a complete clone")
    return digest.hexdigest()


def _torch_requirement() -> str:
    """Return what to install; a bare torch on Linux brings gigabytes of CUDA libraries along."""
    given = os.environ.get("ACCEL_TORCH")
    if given:
        return given
    version = _output(PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    has_gpu = shutil.which("nvidia-smi") is not None and _runs("nvidia-smi", "-L")
    return "torch==2.13.0" if version == "3.11" and not has_gpu else "torch"


if __name__ == "__main__":
    set_up(*sys.argv[1:])
