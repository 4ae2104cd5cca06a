"""Modules of Accelerate that are programs: `python -m`, and their `main`."""

from __future__ import annotations

import sys

import pytest

from accel_callbacks.compat.finder import AliasFinder
from accel_callbacks.compat.names import PROGRAMS, resolve
from tests.compat.test_alias import run

MODULE = ("-m", "accel_callbacks.as_accelerate", "-m")
STANDS_IN = "1.15.0+accel.callbacks"
TELL = """
    import os, sys
    import accelerate

    if os.environ.get("RANK", "0") == "0":
        print(accelerate.__version__, os.environ.get("WORLD_SIZE", "1"))
"""


def test_a_launch_by_its_module_stands_in(tmp_path):
    said = run(tmp_path, TELL, *MODULE, "accelerate.commands.launch", "--cpu")
    assert said.split() == [STANDS_IN, "1"]


@pytest.mark.distributed
def test_a_launch_by_the_module_of_all_commands_stands_in_on_each_process(tmp_path):
    words = ("launch", "--cpu", "--num_processes", "2")
    said = run(tmp_path, TELL, *MODULE, "accelerate.commands.accelerate_cli", *words)
    assert said.split() == [STANDS_IN, "2"]


def test_a_script_launches_others_by_their_module_and_gets_the_exit_code(tmp_path):
    (tmp_path / "other.py").write_text(
        "import accelerate, sys\nprint(accelerate.__version__)\nsys.exit(3)\n"
    )
    said = run(
        tmp_path,
        """
        import os, subprocess, sys
        import accelerate

        other = os.path.join(os.path.dirname(os.path.abspath(__file__)), "other.py")
        words = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", other]
        print(subprocess.run(words).returncode)
        """,
    )
    assert said.split() == [STANDS_IN, "3"]


def test_a_module_that_is_no_program_says_so_in_one_sentence(tmp_path):
    said = run(tmp_path, "", *MODULE, "accelerate.data_loader", expected=1)
    assert "accelerate.data_loader is no program" in said
    assert "accelerate.commands.launch" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("module", sorted(PROGRAMS))
def test_the_main_of_a_module_is_its_subcommand(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    resolve(module, "main")()
    assert f"usage: {' '.join(['accel', PROGRAMS[module]]).strip()} " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["program", "--no_such_option"])
    with pytest.raises(SystemExit) as stop:
        resolve(module, "main")()
    assert stop.value.code == 2


def test_a_process_that_a_program_spawns_does_not_run_it_again():
    exec(AliasFinder().get_code("accelerate.commands.launch"), {"__name__": "__mp_main__"})
