"""Scripts in Accelerate's style run here after `accel migrate`, and print what they print there.

Where accelerate is installed they are run before the move too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from accel_callbacks.cli.main import main
from tests.support import warm

SCRIPTS = Path(__file__).parent / "accelerate_scripts"
# As accelerate 1.15 prints it.
PRINTED = {
    "classifier": "accuracy 60/64 lr 0.2778\naccuracy 62/64 lr 0.3889\n"
    "accuracy 63/64 lr 0.5000\nnorm 1.9076\n",
    "module_style": "processes 1 True\nshape torch.Size([2, 3])\nloss 210.7142\n"
    "gathered ['one'] True\n",
    "checkpointing": "back True 8\nfiles ['model.safetensors']\nweights -0.16367\n",
}
NAMES = [
    "classifier",
    pytest.param("module_style", marks=pytest.mark.slow),
    pytest.param("checkpointing", marks=pytest.mark.slow),
]


def printed(script: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCEL_CPU": "1"}
    words = [sys.executable, str(script)]
    words += [str(script.parent / "out")] if script.stem == "checkpointing" else []
    result = warm.run(words, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_moved_script_prints_the_same(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    shutil.copy(SCRIPTS / script.name, script)
    assert main(["migrate", "--write", str(script)]) == 0
    assert "from accelerate" not in script.read_text(encoding="utf-8")
    assert printed(script) == PRINTED[name]


@pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="needs accelerate")
@pytest.mark.parametrize("name", NAMES)
def test_accelerate_prints_this(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    shutil.copy(SCRIPTS / script.name, script)
    assert printed(script) == PRINTED[name]
