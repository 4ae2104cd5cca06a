"""A user's own `loggers` or `checkpoint_io` beside the script: one clear error, or no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import accel_callbacks

ROOT = Path(accel_callbacks.__file__).resolve().parent.parent
NAMES = ("loggers", "checkpoint_io")
both = pytest.mark.parametrize("name", NAMES)

# A name that costs no import of torch.
IMPORT = "from accel_callbacks import LostRankError\n"

SCRIPT = """
import torch
from accel_callbacks import Accelerator

accel = Accelerator(cpu=True, project_dir="runs", log_with="jsonl")
model, data = accel.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(range(2)))
for batch in data:
    pass
print("trained", accel.current_run.epochs_done)
accel.log({"a": 1})
accel.save_state("saved")
accel.save_model(model, "model")
"""


def start(folder: Path, script: str, *, on_path: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, with our packages on the path after it (as when installed)."""
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if on_path:
        environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("ImportError: accel_callbacks needs its own package"), done.stderr
    return line


@both
@pytest.mark.parametrize(
    "line",
    [
        "from accel_callbacks import Accelerator",
        "from accel_callbacks.callbacks import EarlyStopping",
        "from accel_callbacks.utils import set_seed",
        "import accel_callbacks; accel_callbacks.Accelerator",
    ],
)
def test_a_file_of_this_name_is_named_by_the_first_import(tmp_path, name, line):
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported by mistake')\n")
    error = error_of(start(tmp_path, f"{line}\n"))
    for part in (repr(name), str(tmp_path / f"{name}.py"), "Rename", str(ROOT)):
        assert part in error


def test_ours_are_found_from_anywhere_beside_folders_without_init(tmp_path):
    for name in NAMES:
        (tmp_path / name).mkdir()
    done = start(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained 1\n"
    for made in ("runs/metrics.jsonl", "saved", "model/model.safetensors"):
        assert (tmp_path / made).exists()


@both
def test_a_package_of_the_same_name_is_named_too(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    assert str(tmp_path / name) in error_of(start(tmp_path, IMPORT))


def test_a_folder_without_init_works_or_is_named_however_ours_is_installed(tmp_path):
    """An editable install may find ours only after such a folder; loggers needs no torch."""
    (tmp_path / "loggers").mkdir()
    script = IMPORT + "import loggers\nassert loggers.__file__\n"
    done = start(tmp_path, script, on_path=False)
    if done.returncode:
        assert str(tmp_path / "loggers") in error_of(done)


@both
def test_a_module_that_the_user_imported_earlier_is_named(tmp_path, name):
    """Even from a folder that is no longer on the path when our package is needed."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / f"{name}.py").write_text("mine = True\n")
    before = f"import sys\nsys.path.insert(0, 'lib')\nimport {name}\nsys.path.pop(0)\n"
    assert f"{name}.py" in error_of(start(tmp_path, before + IMPORT))


@both
def test_a_folder_without_init_that_was_imported_earlier_is_named(tmp_path, name):
    (tmp_path / "lib" / name).mkdir(parents=True)
    before = (
        f"import sys\nkept, sys.path[:] = list(sys.path), ['lib']\n"
        f"import {name}\nsys.path[:] = kept\n"
    )
    assert f"lib/{name}" in error_of(start(tmp_path, before + IMPORT))
