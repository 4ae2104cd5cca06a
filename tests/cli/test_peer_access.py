"""GeForce RTX 40 cards at a launch: which variables are set, and what nvidia-smi may do."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_callbacks.cli import launch
from accel_callbacks.cli.main import main
from accel_callbacks.launch import machine
from accel_callbacks.launch.machine import GpuDriver, gpu_drivers, nvidia_smi
from accel_callbacks.launch.peer_access import nccl_workarounds

BOTH = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
CARD = "NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize(
    ("gpus", "environment", "chosen"),
    [
        ([(CARD, "535.54.03")] * 2, {}, BOTH),
        ([("NVIDIA GeForce RTX 4060 Ti", "550.40.06")] * 2, {}, BOTH),
        ([("NVIDIA GeForce RTX 3090", "535.54"), (CARD, "535.54")], {}, BOTH),
        ([(CARD, "no version")] * 2, {}, BOTH),
        ([(CARD, "535.54.03")] * 2, {"NCCL_P2P_DISABLE": "0"}, {"NCCL_IB_DISABLE": "1"}),
        ([(CARD, "535.54.03")] * 2, {"NCCL_P2P_DISABLE": "", "NCCL_IB_DISABLE": "1"}, {}),
        ([(CARD, "535.54.03")], {}, {}),
        ([(CARD, "550.40.07")] * 2, {}, {}),
        ([(CARD, "570.1")] * 2, {}, {}),
        ([("NVIDIA RTX 4000 Ada Generation", "535.54.03")] * 2, {}, {}),
        ([("NVIDIA H100 80GB HBM3", "535.54.03")] * 8, {}, {}),
        ([], {}, {}),
    ],
    ids=str,
)
def test_variables_by_card_and_driver(gpus, environment, chosen) -> None:
    assert nccl_workarounds([GpuDriver(*one) for one in gpus], environment) == chosen


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write an nvidia-smi; a launch believes that there are two GPUs."""
    monkeypatch.setattr(machine, "has_driver", lambda kind, root=None: True)
    monkeypatch.setattr(launch, "has_driver", lambda kind: True)
    monkeypatch.setattr(launch, "_count_devices", lambda: 2)
    for name in BOTH:
        monkeypatch.delenv(name, raising=False)

    def write(script: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


PRINTS = f"echo '{CARD}, 535.54.03'; echo '{CARD}, 535.54.03'"
WORDS = ["launch", "--dry_run", "--num_processes", "2", "-m", "timeit"]


def test_a_launch_sets_them_and_says_so(smi, capsys: pytest.CaptureFixture[str]) -> None:
    smi(PRINTS)
    assert main(WORDS) == 0
    out, err = capsys.readouterr()
    assert "export NCCL_P2P_DISABLE=1\n" in out
    assert "export NCCL_IB_DISABLE=1\n" in out
    assert "sets NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1" in err
    assert "550.40.07" in err


def test_what_is_set_stays(
    smi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(PRINTS)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    assert main(WORDS) == 0
    out, err = capsys.readouterr()
    assert "NCCL_P2P_DISABLE" not in out + err


@pytest.mark.parametrize("words", [["--cpu"], ["--num_processes", "1"]], ids=" ".join)
def test_without_several_gpus_nothing_is_asked(
    words: list[str], smi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(f"touch {tmp_path}/asked; {PRINTS}")
    assert main(["launch", "--dry_run", "--num_processes", "2", *words, "-m", "timeit"]) == 0
    assert "NCCL_P2P_DISABLE" not in "".join(capsys.readouterr())
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    "script",
    ["sleep 60", "echo 'Unable to determine the device handle' >&2; exit 15", "exit 0"],
    ids=["hangs", "fails", "prints nothing"],
)
def test_an_nvidia_smi_without_an_answer_holds_up_no_launch(
    script: str, smi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_SMI_SECONDS", 0.2)
    smi(f"exec {script}" if script.startswith("sleep") else script)
    assert main(WORDS) == 0
    assert "NCCL_P2P_DISABLE" not in "".join(capsys.readouterr())


def test_nonsense_of_nvidia_smi_is_no_gpu(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    smi("echo 'no comma here'; echo ', 1'; head -c 300000 /dev/zero | tr '\\0' 'x'")
    assert gpu_drivers(os.environ) == ()
    smi("printf 'a\\033[31mb, 5\\n\\377\\376, 6\\n'")
    assert all(one.name.isprintable() for one in gpu_drivers(os.environ))
    assert nvidia_smi({"PATH": ""}, "-L") == []
