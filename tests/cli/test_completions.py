"""``accel completions``: the scripts are tried in the shells themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accel_callbacks.cli.completions import places, spelled
from accel_callbacks.cli.main import main
from accel_callbacks.cli.registry import COMMANDS
from tests.support.site_extension import site_extension

LAUNCH = "accel launch --num_processes 2"
# what is typed, and some of what is offered; "" for nothing at all
CASES = {
    "accel la": ["launch"],
    "accel ckpt ": ["ls", "list", "rm", "cp", "show"],
    "accel ckpt prune x --mo": ["--mode"],
    "accel ckpt prune x --mode ": ["min", "max"],
    "accel ckpt prune --keep-last 3 x --metr": ["--metric"],
    "accel launch --mixed_pr": ["--mixed_precision"],
    "accel launch --mixed-pr": ["--mixed-precision"],
    "accel launch --mixed-precision b": ["bf16"],
    f"{LAUNCH} --mixed_precision b": ["bf16"],
    f"{LAUNCH} train.py --mixed_pr": [],
    f"{LAUNCH} train.py la": [],
    "accel completions z": ["zsh"],
    "accel nonsense --": [],
    "accel ckpt nonsense --": [],
    "accel ckpt show x --pat": ["--pattern"],
    "accel ckpt ls show --pat": [],
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts, in which there is no other file."""
    folder = tmp_path_factory.mktemp("completions")
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "accel_callbacks.cli", "completions", shell]
        with open(folder / f".{shell}", "w") as file:
            subprocess.run(command, stdout=file, check=True, timeout=60)
    return folder


def shell(name: str, text: str, folder: Path, *words: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    result = subprocess.run(
        [name, *words, "-c", text], capture_output=True, text=True, cwd=folder, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_every_option_is_in_it() -> None:
    known = {place.path: place for place in places()}
    assert set(known[""].words) == set(COMMANDS)
    assert set(COMMANDS) <= set(known)
    flags = {flag for option in known["ckpt prune"].options for flag in option.flags}
    assert {"--keep_last", "--keep-last", "-h", "--help"} <= flags
    assert known["launch"].ends
    helps = [option.help for place in known.values() for option in place.options]
    assert not [text for text in helps if "%(" in text or "\n" in text]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_is_in_the_reference(command: str) -> None:
    """The site has a table made from the parser where the page has a mark for it."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
    section = page.read_text(encoding="utf-8").split(f"\n## accel {command}\n")[1].split("\n## ")[0]
    ours = [place for place in places() if place.path.split(" ")[0] == command]
    flags = {flag for place in ours for option in place.options for flag in spelled(option.flags)}
    flags -= {"-h", "--help"}
    assert (f"<!-- options of accel {command} -->\n" in section) == bool(flags)
    table = site_extension("cli_options").options_of(command)
    if command == "test":  # it takes those of a launch too, which are in the table of that
        table += site_extension("cli_options").options_of("launch")
    switched_off = {f"--no_{flag[2:]}" for flag in flags}
    assert [flag for flag in flags - switched_off if f"`{flag}" not in table] == []
    words = {word for place in ours for word in place.words}
    assert [word for word in words if not re.search(rf"`[^`\n]*\b{word}\b", section + table)] == []


def test_bash(scripts: Path) -> None:
    # as readline calls it: the words, the last of them cut off at the cursor
    loop = "set -u; source .bash; complete -p accel > /dev/null\n"
    for line in CASES:
        loop += f"""COMP_WORDS=({line.replace("=", " = ")}{' ""' if line.endswith(" ") else ""})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _accel; echo "${{COMPREPLY[*]-}}"\n"""
    answers = shell("bash", loop, scripts, "--norc").splitlines()
    for (line, expected), answer in zip(CASES.items(), answers, strict=True):
        assert set(expected) <= set(answer.split()), line
        assert expected or not answer, line


def test_bash_by_hand(scripts: Path) -> None:
    """A real interactive bash: what is typed, with tabs, is what runs."""
    typed = "accel la\t--mixed_p\tbf\t--mixed-precision=fp1\tx.py --mixed_p\t\n"
    code = """
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.execlp("bash", "bash", "--norc", "--noprofile", "-i")
os.write(fd, b"bind 'set enable-bracketed-paste off'; source .bash\\n")
os.write(fd, b"accel() { printf 'RAN:%s\\\\n' \\"$*\\"; exit; }\\n")
os.write(fd, sys.argv[1].encode())
seen = b""
try:
    while chunk := os.read(fd, 4096):
        seen += chunk
except OSError:
    pass
print(seen.decode().split("\\nRAN:")[-1])
"""
    result = subprocess.run(
        [sys.executable, "-c", code, typed], capture_output=True, text=True, cwd=scripts, timeout=60
    )
    ran = "launch --mixed_precision bf16 --mixed-precision=fp16 x.py --mixed_p"
    assert result.stdout.splitlines()[0] == ran, result.stdout + result.stderr


def test_fish(scripts: Path) -> None:
    loop = "source .fish\n" + "".join(
        f'complete -C "{line}" | string replace -r "\\t.*" "" | string join " "; echo "|"\n'
        for line in CASES
    )
    answers = shell("fish", loop, scripts, "--no-config").split("|\n")
    for (line, expected), answer in zip(CASES.items(), answers, strict=False):
        assert set(expected) <= set(answer.split()), line
        assert expected or not answer.strip(), line


def test_zsh(scripts: Path) -> None:
    """A real interactive zsh on a pseudo-terminal."""
    typed = "accel la\\t--mixed_p\\tbf\\t--mixed-precision=fp1\\tx.py --mixed_p\\t"
    text = f"""
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z 'autoload -U compinit; compinit -D -u; source .zsh; accel() {{ print "RAN:$*:" }}'
zpty -w z 'print REA""DY'
zpty -r -m z seen '*READY*'
zpty -w z $'{typed}'
zpty -r -m z seen '*RAN:*:*'
print -r -- "$seen"
zpty -d z
"""
    ran = "RAN:launch --mixed_precision bf16 --mixed-precision=fp16 x.py --mixed_p:"
    assert ran in shell("zsh", text, scripts, "-f")


@pytest.mark.parametrize("words", [["completions", "fish"], ["migrate", __file__]])
def test_needs_no_torch(words: list[str]) -> None:
    code = "import sys; from accel_callbacks.cli.main import main\nassert main(sys.argv[1:]) == 0\n"
    code += "assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_no_such_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completions", "tcsh"]) == 2
    assert "invalid choice" in capsys.readouterr().err
