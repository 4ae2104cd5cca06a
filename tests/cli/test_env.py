"""``accel env``: the config file in effect, no secrets, and a reader that goes away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accel_callbacks.cli.main import main


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path


def env(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["env", *words]) == 0
    return capsys.readouterr().out


def test_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert env(capsys).endswith("- Config file: none\n")


def test_the_config_in_effect(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "accel.yaml").write_text("num_processes: 2\ndynamo_config:\n  dynamo_mode: default\n")
    text = env(capsys)
    assert f"- Config file: {place / 'accel.yaml'}\n  - num_processes: 2\n" in text
    assert "  - dynamo_config:\n    - dynamo_mode: default\n" in text
    (place / "other.json").write_text('{"num_processes": 3}')
    assert "- num_processes: 3\n" in env(capsys, "--config_file", "other.json")


@pytest.mark.parametrize("text", ["a: [", "!!python/object/apply:os.system [ls]", "\0", None])
def test_a_config_that_cannot_be_read(
    text: str | None, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place / "wrong.yaml"
    if text is not None:
        path.write_text(text)
    last = env(capsys, "--config_file", str(path)).splitlines()[-1]
    assert last.startswith("  cannot be read: ")


def test_secrets_and_escapes_are_not_shown(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_API_TOKEN", "hush")
    monkeypatch.setenv("ACCEL_X", "a\x1b[31m\nb")
    (place / "accel.yaml").write_text("tpu_env: []\nsome_password: hush\n")
    text = env(capsys)
    assert "hush" not in text
    assert "- ACCEL_X: a\\x1b[31m\\nb\n" in text


def test_a_torch_that_cannot_be_imported_is_reported(place: Path) -> None:
    (place / "torch.py").write_text("raise OSError('no libcudart')")
    result = subprocess.run(
        [sys.executable, "-m", "accel_callbacks.cli", "env"],
        capture_output=True,
        text=True,
        cwd=place,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "cannot be imported: OSError: no libcudart\n" in result.stdout


@pytest.mark.parametrize(
    "words",
    [["--help"], ["env", "--short"], ["completions", "bash"], ["config", "show"]],
    ids=" ".join,
)
def test_a_pipe_that_closes(words: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_callbacks.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(60)
    assert "Traceback" not in err
    assert "rror" not in err
    # With unbuffered output argparse itself ignores that the pipe is closed.
    assert process.returncode == 141 or (words == ["--help"] and process.returncode == 0)


def test_an_output_that_is_closed_from_the_start() -> None:
    command = [sys.executable, "-m", "accel_callbacks.cli", "env", "--short"]
    result = subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "bash", *command], stderr=subprocess.PIPE, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_file_that_would_not_be_shown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--short", "--config_file", "a.yaml"]) == 2
    assert "leave out --config_file" in capsys.readouterr().err
