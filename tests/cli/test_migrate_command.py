"""``accel migrate``: what it prints and writes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from accel_callbacks.cli.main import main
from accel_callbacks.compat import migrate as migration

SCRIPT = b"# -*- coding: latin-1 -*-\n# \xe4\r\nimport accelerate\r\naccelerate.gather"


MOVED = SCRIPT.replace(b"import accelerate", b"import accel_callbacks as accelerate")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(SCRIPT)
    path.chmod(0o751)
    return path


def migrate(*words: object) -> int:
    return main(["migrate", *map(str, words)])


def test_only_shows(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert migrate(script) == 0
    out, err = capsys.readouterr()
    assert "\n-import accelerate\r\n" in out
    assert "\n+import accel_callbacks as accelerate\r\n" in out
    assert "nothing else to do" in out
    assert "--write" in err
    assert script.read_bytes() == SCRIPT


def test_c15e_imports_for_tests_stay_and_fail_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test_train.py"
    path.write_text(
        "import accelerate\n"
        "from accelerate.test_utils.testing import execute_subprocess_async, require_cuda\n"
        "from accelerate.test_utils import *\n"
        "from accelerate import Accelerator, test_utils\n"
        "accelerate.test_utils.get_launch_command()\n"
        "test_utils.RegressionDataset()\n"
        "accelerate.utils.set_seed(1)\n"
    )
    assert migrate(path, "--write") == 0
    out = capsys.readouterr().out
    assert "does not run here" not in out
    assert "execute_subprocess_async: left as it is: only tests import it" in out
    assert "accelerate.test_utils: left as it is" in out
    after = path.read_text()
    assert "from accel_callbacks import Accelerator\n" in after
    assert (
        "from accelerate.test_utils.testing import execute_subprocess_async, require_cuda" in after
    )
    assert "import accelerate\n" in after
    assert "accelerate.test_utils.get_launch_command()" in after
    path.write_text("from accelerate.test_utils import x\nfrom accelerate import prepare_pippy\n")
    assert migrate(path) == 1


def test_writes_bytes_mode_and_through_a_link(script: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(script)
    assert migrate(link, "--write") == 0
    assert script.read_bytes() == MOVED
    assert script.stat().st_mode & 0o777 == 0o751
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "train.py"]
    assert migrate(link, "--write") == 0  # nothing to do


def test_a_byte_order_mark_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"\xef\xbb\xbfimport accelerate")
    assert migrate(path, "--write") == 0
    assert path.read_bytes() == b"\xef\xbb\xbfimport accel_callbacks as accelerate"


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
def test_the_diff_is_a_patch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("classifier", "module_style"):
        shutil.copy(Path(__file__).parent / "accelerate_scripts" / f"{name}.py", tmp_path)
    (tmp_path / "end.py").write_text("import accelerate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        migrate("--diff", ".")
        diff = capsys.readouterr().out
        subprocess.run(["patch", "-p1", "-s"], input=diff, text=True, check=True, cwd=tmp_path)
        assert (tmp_path / "end.py").read_text() == "import accel_callbacks as accelerate"
        assert migrate("--diff", ".") == 0
        assert capsys.readouterr().out == ""


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ("a.py", "in/b.ipynb", ".git/c.py", "env/lib/d.py", "in/e.txt", "__pycache__/f.py")
    for place in places:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"cells": []}' if place.endswith("ipynb") else "import accelerate\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert migrate(tmp_path, tmp_path / "a.py", "--write") == 0
    assert capsys.readouterr().err == f"wrote {tmp_path / 'a.py'}\n"


def test_a_folder_is_not_left_through_links(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    for path in (ours / "a.py", ours / ".tools" / "b.py", others / "c.py", others / "d.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import accelerate\n")
    (ours / "file.py").symlink_to(others / "c.py")
    (ours / "folder").symlink_to(others)
    (ours / "hidden.py").symlink_to(ours / ".tools" / "b.py")
    (ours / "same.py").symlink_to("a.py")  # its target is migrated under its own name
    assert migrate(ours, "--write") == 0
    assert (ours / "a.py").read_text() == "import accel_callbacks as accelerate\n"
    for path in (ours / ".tools" / "b.py", others / "c.py", others / "d.py"):
        assert path.read_text() == "import accelerate\n", path
    assert migrate(ours / "file.py", ours / "folder", "--write") == 0
    for name in ("c.py", "d.py"):  # what is named is migrated
        assert (others / name).read_text() == "import accel_callbacks as accelerate\n"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("absent.py", None, "no such file"),
        ("broken.py", b"import (", "line 1"),
        ("two.py", b"print 'x'\nimport accelerate", "line 1"),
        ("wrong.py", b"# \xe4", "encoding"),
        ("late.py", b"\n\n\n# \xe4", "utf-8"),
        ("odd.py", b"# -*- coding: nonsense -*-\n", "nonsense"),
        ("nul.py", b"x = 1\0", "null bytes"),
    ],
)
def test_what_cannot_be_read(
    name: str, data: bytes | None, said: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script.parent / name
    if data is not None:
        path.write_bytes(data)
    assert migrate(path, script, "--write") == 1
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 2
    assert b"accel_callbacks" in script.read_bytes()  # the others are moved all the same


def test_left_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text("from accelerate import prepare_pippy\n")
    assert migrate(path) == 1
    assert "line 1: prepare_pippy: " in capsys.readouterr().out


def test_a_full_disk_loses_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(migration, "sync_file", Mock(side_effect=full))
        assert migrate(script, "--write") == 1
    assert "No space left on device; it is unchanged" in capsys.readouterr().err
    assert script.read_bytes() == SCRIPT
    assert list(script.parent.iterdir()) == [script]


def test_a_notebook_is_refused_with_what_serves_instead(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert migrate(script, "train.ipynb", "--write") == 2
    err = capsys.readouterr().err
    assert "train.ipynb" in err
    assert "It was removed in 0.2.0. `jupytext --to py NOTEBOOK`" in err
    assert script.read_bytes() == SCRIPT


def test_an_output_that_cannot_hold_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import accelerate  # \u00e4\n", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "accel_callbacks.cli", "migrate", str(path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "PYTHONIOENCODING=utf-8" in result.stderr
