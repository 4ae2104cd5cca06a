"""The command itself: help, version, suggestions, and that none of it imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import accel_callbacks
from accel_callbacks.cli.main import main
from accel_callbacks.cli.parser import CommandParser, natural_int, positive_int
from accel_callbacks.cli.registry import COMMANDS

PROBE = """
import sys
from accel_callbacks.cli.main import main
code = main(sys.argv[1:])
print("torch imported:", "torch" in sys.modules)
sys.exit(code)
"""


def probe(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["env", "--help"],
        ["env", "--short"],
        ["launch", "--help"],
        ["launch", "--dry_run", "--num_processes=2", "-m", "timeit"],
        ["launch", "--dry_run", "--cpu", "-m", "timeit"],
    ],
    ids=" ".join,
)
def test_needs_no_torch(words: list[str]) -> None:
    result = probe(*words)
    assert result.returncode == 0, result.stderr
    assert "torch imported: False" in result.stdout


def test_the_probe_sees_torch() -> None:
    assert "torch imported: True" in probe("env").stdout


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and command.help in text for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"accel {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel-callbacks {accel_callbacks.__version__}\n"


def test_help_names_an_option_in_one_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--config_file FILE" in text
    assert "--config-file" not in text
    assert text.count("--num-processes") == 1  # where it says that both are read


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_unknown_command_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lunch"]) == 2
    assert "did you mean 'launch'" in capsys.readouterr().err


def test_unknown_option_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--num_proceses=2", "s.py"]) == 2
    assert "did you mean '--num_processes'" in capsys.readouterr().err


def test_abbreviations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--num_proc=2", "s.py"]) == 2


def test_both_spellings() -> None:
    parser = CommandParser("p", "d")
    parser.option("--a_b", type=positive_int)
    assert parser.parse(["--a_b", "1"]).a_b == parser.parse(["--a-b", "1"]).a_b == 1


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5"])
def test_positive_int_refuses(text: str) -> None:
    with pytest.raises(Exception, match="at least 1"):
        positive_int(text)


def test_natural_int() -> None:
    assert natural_int("0") == 0


def test_env_names_what_matters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setenv("ACCEL_CPU", "1")
    monkeypatch.setenv("UNRELATED_SECRET", "hush")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for part in (torch.__version__, "safetensors: ", "RAM: ", "ACCEL_CPU: 1", "gloo"):
        assert part in text
    assert "hush" not in text
