"""The scripts that set up an environment, which must work from a bare clone on any system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ("environment.py", "demo.py", "test.py", "_setup.sh", "demo", "test")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts in a folder of their own, with what they read."""
    (tmp_path / "scripts").mkdir()
    for name in SCRIPTS:
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def start(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    # Inherited variables could name another interpreter.
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "PYTHONPATH")}
    return subprocess.run(words, cwd=folder, env={**kept, **env}, capture_output=True, text=True)


def test_a_set_up_that_is_done_is_not_repeated(clone: Path) -> None:
    code = (
        "import environment as e; e._make_venv(); mark = e._fingerprint()\n"
        "for extra in ('test', 'examples'):\n"
        "    (e.VENV / f'accel-setup-{extra}').write_text(mark + '\\n')"
    )
    made = start(clone, sys.executable, "-c", code, PYTHONPATH=str(clone / "scripts"))
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"== make the environment {clone / '.venv'} with Python 3")
    commands = [[sys.executable, "scripts/test.py"]]
    commands += [["bash", "scripts/test"]] if os.name == "posix" else []
    for command in commands:
        done = start(clone, *command, "--set-up")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "== environment .venv is ready for [test,examples]\n"
    failed = start(clone, sys.executable, "scripts/test.py", "tests")
    assert failed.returncode == 1, "there is no pytest, whose exit code is returned"


@pytest.mark.parametrize("name", ["demo", "test"])
def test_a_missing_interpreter_is_an_error_with_advice(clone: Path, name: str) -> None:
    commands = [[sys.executable, f"scripts/{name}.py"]]
    commands += [["bash", f"scripts/{name}"]] if os.name == "posix" else []
    for command in commands:
        done = start(clone, *command, PYTHON="no-such-python")
        assert done.returncode == 1
        assert "error: no Python 3.10 or newer found (tried no-such-python)" in done.stderr
        assert "  what to do: install one, or name it" in done.stderr


def test_windows_has_other_folders(clone: Path) -> None:
    code = "import sys; sys.platform = 'win32'; import environment; print(environment.PYTHON)"
    done = start(clone, sys.executable, "-c", code, PYTHONPATH=str(clone / "scripts"))
    assert done.stdout.strip() == str(clone / ".venv" / "Scripts" / "python.exe"), done.stderr
