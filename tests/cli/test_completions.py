"""``accel completions``: what is offered, and the script tried in a real shell."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_callbacks.cli.completions import parser_of
from accel_callbacks.cli.main import main
from accel_callbacks.cli.registry import COMMANDS
from tests.support.site_extension import site_extension

LAUNCH = "accel launch --num_processes 2"
# what is typed, and all that is offered; "..." for more
CASES = {
    "accel la": ["launch"],
    "accel ckpt ": ["ls", "list", "rm", "show", "..."],
    "accel ckpt prune x --mo": ["--mode"],
    "accel ckpt prune x --mode ": ["min", "max"],
    "accel ckpt prune --keep-last 3 x --metr": ["--metric"],
    "accel launch --mixed_pr": ["--mixed_precision"],
    "accel launch --mixed-pr": ["--mixed-precision"],
    "accel launch --mixed-precision b": ["bf16"],
    "accel launch --mixed-precision=fp1": ["--mixed-precision=fp16"],
    f"{LAUNCH} --mixed_precision b": ["bf16"],
    f"{LAUNCH} train.py --mixed_pr": [],
    f"{LAUNCH} train.py la": [],
    "accel completions z": ["zsh"],
    "accel ckpt nonsense --": ["--help"],
    "accel ckpt show x --pat": ["--pattern"],
    "accel ckpt ls show --pat": [],
}
ACCEL = [sys.executable, "-m", "accel_callbacks.cli"]


def offered(line: str, folder: Path) -> list[str]:
    """Return what ``accel`` answers to a shell."""
    answer = folder / "answer"
    variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    variables |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SHELL": "fish"}
    result = subprocess.run(ACCEL, env={**os.environ, **variables}, capture_output=True, cwd=folder)
    assert result.returncode == 0, result.stderr
    return [word.strip() for word in answer.read_text().split("\013") if word]


def test_what_is_offered(tmp_path: Path) -> None:
    wrong = {}
    for line, expected in CASES.items():
        words = offered(line, tmp_path)
        known = {*expected} - {"..."}
        if (known - {*words}) if "..." in expected else words != expected:
            wrong[line] = words
    assert wrong == {}


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the flags of a parser, with ``_``, and words; of subparsers too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield "word", name
                yield from options_of(subparser)
        elif action.help != argparse.SUPPRESS:
            flags = [flag for flag in action.option_strings if flag not in ("-h", "--help")]
            spelled = {flag.replace("-", "_") for flag in flags}
            for flag in flags:
                if "-" not in flag[2:] or len(spelled) == len(flags):
                    yield "flag", flag


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_is_in_the_reference(command: str) -> None:
    """The site has a table made from the parser where the page has a mark for it."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
    section = page.read_text(encoding="utf-8").split(f"\n## accel {command}\n")[1].split("\n## ")[0]
    subparsers = parser_of(f"accel {command}")._subparsers
    assert subparsers is not None
    parser = subparsers._group_actions[0].choices[command]  # type: ignore[index, call-overload]
    names = list(options_of(parser))
    flags = {name for kind, name in names if kind == "flag"}
    assert (f"<!-- options of accel {command} -->\n" in section) == bool(flags)
    table = site_extension("cli_options").options_of(command)
    if command == "test":  # it takes those of a launch too, which are in the table of that
        table += site_extension("cli_options").options_of("launch")
    switched_off = {f"--no_{flag[2:]}" for flag in flags}
    assert [flag for flag in flags - switched_off if f"`{flag}" not in table] == []
    words = {name for kind, name in names if kind == "word"}
    assert [word for word in words if not re.search(rf"`[^`\n]*\b{word}\b", section + table)] == []


def test_bash_by_hand(tmp_path: Path) -> None:
    """A real interactive bash: what is typed, with tabs, is what runs."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    with open(tmp_path / ".bash", "w") as file:
        subprocess.run([*ACCEL, "completions", "bash"], stdout=file, check=True)
    (tmp_path / "accel").write_text(
        f'#!/bin/sh\n[ -z "$_ARGCOMPLETE" ] || exec {" ".join(ACCEL)}\nprintf "RAN:%s\\n" "$*"\n'
    )
    (tmp_path / "accel").chmod(0o755)
    typed = "accel la\t--mixed_p\tbf\t--mixed-precision=fp1\t x.py --mixed_p\t\nexit\n"
    code = """
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.execlp("bash", "bash", "--norc", "--noprofile", "-i")
os.write(fd, b"bind 'set enable-bracketed-paste off'; source .bash\\n")
os.write(fd, sys.argv[1].encode())
seen = b""
try:
    while chunk := os.read(fd, 4096):
        seen += chunk
except OSError:
    pass
print(seen.decode().split("\\nRAN:")[-1])
"""
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [sys.executable, "-c", code, typed],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
    )
    ran = "launch --mixed_precision bf16 --mixed-precision=fp16 x.py --mixed_p"
    assert result.stdout.splitlines()[0] == ran, result.stdout + result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_a_script_asks_accel(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completions", shell]) == 0
    script = capsys.readouterr().out
    assert "accel" in script
    assert "_ARGCOMPLETE" in script


@pytest.mark.parametrize("words", [["completions", "fish"], ["migrate", __file__]])
def test_needs_no_torch(words: list[str]) -> None:
    code = "import sys; from accel_callbacks.cli.main import main\nassert main(sys.argv[1:]) == 0\n"
    code += "assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, *words]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_without_argcomplete_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete.shell_integration", None)
    assert main(["completions", "bash"]) == 1
    assert "pip install accel-callbacks[completions]" in capsys.readouterr().err


def test_no_such_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completions", "tcsh"]) == 2
    assert "invalid choice" in capsys.readouterr().err
