"""``accel env``: the config file in effect, no secrets, and a reader that goes away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel_callbacks.cli.main import main
from accel_callbacks.launch import machine


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
    )
    assert result.returncode == 0, result.stderr
    assert "cannot be imported: OSError: no libcudart\n" in result.stdout


@pytest.mark.parametrize(
    "words",
    [["--help"], ["env", "--short"], ["config", "show"]],
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
    process.wait()
    assert "Traceback" not in err
    assert "rror" not in err
    # With unbuffered output argparse itself ignores that the pipe is closed.
    assert process.returncode == 141 or (words == ["--help"] and process.returncode == 0)


def test_an_output_that_is_closed_from_the_start() -> None:
    command = [sys.executable, "-m", "accel_callbacks.cli", "env", "--short"]
    result = subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "bash", *command], stderr=subprocess.PIPE
    )
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_file_that_would_not_be_shown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--short", "--config_file", "a.yaml"]) == 2
    assert "leave out --config_file" in capsys.readouterr().err


class Properties:
    """What torch knows of a GPU."""

    name, total_memory, major, minor = "NVIDIA H100 80GB HBM3", 79 * 2**30, 9, 0


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two GPUs in torch's eyes, and an nvidia-smi of our own."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    kind = lambda: torch.device("cuda")  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", kind)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one < other)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(machine, "_SMI_SECONDS", 0.2)

    def write(script: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


def test_gpus_driver_and_nccl(gpus, capsys: pytest.CaptureFixture[str]) -> None:
    gpus("echo 'NVIDIA H100 80GB HBM3, 580.65.06'; echo 'NVIDIA H100 80GB HBM3, 580.65.06'")
    text = env(capsys)
    one = "NVIDIA H100 80GB HBM3 79.0 GiB, capability 9.0"
    assert f"- Accelerator devices: cuda:0 {one}; cuda:1 {one}\n" in text
    assert "- torch CUDA: 13.0\n" in text
    assert "- NVIDIA driver: 580.65.06\n" in text
    assert "- NCCL: 2.27.5\n" in text


@pytest.mark.parametrize(
    "script",
    [
        "exec sleep 60",
        "exit 9",
        "echo 'GPU0 GPU1'; echo 'GPU0 X maybe'; echo 'GPU1 what X'",
        "printf 'GPU0\\033]0;title\\007 X\\n'",
        "head -c 500000 /dev/urandom",
    ],
    ids=["hangs", "fails", "nonsense", "escapes", "noise"],
)
def test_an_nvidia_smi_that_is_of_no_use(
    script: str, gpus, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(script)
    text = env(capsys)
    assert "\x1b" not in text
    if "urandom" not in script and "GPU0" not in script:
        assert "- NVIDIA driver: unknown: nvidia-smi has no answer\n" in text


def test_a_driver_that_fails_is_an_answer_too(
    gpus, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA unknown error")

    gpus("exit 1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    monkeypatch.setattr(torch.cuda.nccl, "version", broken)
    text = env(capsys)
    for name in ("Accelerator devices", "NCCL"):
        assert f"- {name}: cannot be read: RuntimeError: CUDA unknown error\n" in text
    assert text.endswith("- Config file: none\n")


def test_without_cuda_there_are_no_lines_of_nvidia(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.version.cuda is None:
        text = env(capsys)
        assert "NVIDIA" not in text
        assert "NCCL:" not in text


def test_variables_of_the_backends_are_shown_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {
        "NCCL_P2P_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    for name, value in {**shown, "NCCL_PLUGIN_TOKEN": "hush", "NCCLX": "no"}.items():
        monkeypatch.setenv(name, value)
    text = env(capsys, "--short")
    assert all(f"- {name}: {value}\n" in text for name, value in shown.items())
    assert "- NCCL_PLUGIN_TOKEN: (set, not shown)\n" in text
    assert "NCCLX" not in text
