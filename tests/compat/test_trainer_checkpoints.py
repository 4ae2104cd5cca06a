"""Checkpoints of the Trainer where this library stands in: kills, damage, other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_callbacks.addons.trainer.trainer_folder import newest_whole
from checkpoint_io.folder.sealed import seal_folder

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


def run(*command: str, expected: int = 0) -> str:
    """Run a command of Python, and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_changes_no_weight(tmp_path):
    pytest.importorskip("transformers")
    script = HERE / "killed_trainer.py"
    said = run("-m", "accel_callbacks.as_accelerate", str(script), str(tmp_path))
    outcomes = dict(json.loads(line) for line in said.splitlines() if line.startswith('["'))
    unbroken, damage = outcomes.pop("unbroken"), outcomes.pop("damaged")
    for name, weights in (("terminated", unbroken), ("best", outcomes.pop("best unbroken"))):
        outcome = outcomes.pop(name)
        assert outcome == {"stopped": "SystemExit: 75", "newest": 5, "resumed": weights}
    assert outcomes.pop("mirrored") == {
        "stopped": "SystemExit: 75",
        "copies": ["step-00000004", "step-00000005"],
        "ended": unbroken,  # from the fourth step: the copy of the fifth is damaged
        "kept": ["step-00000010", "step-00000012"],
    }
    assert "a copy in" in said
    assert len(outcomes) == 8
    assert set(outcomes.values()) == {unbroken}
    assert damage["newest"] == unbroken
    assert "was trained with 2 samples a step, and now there are 4" in " ".join(said.split())
    assert damage["named"].startswith("CorruptCheckpointError: ")
    assert damage["named"].endswith(
        "checkpoint-12 is not resumed from: the bytes of optimizer.pt are not those that were "
        f"sealed; resume from {tmp_path / 'unbroken' / 'checkpoint-10'}."
    )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_signal_to_the_launcher_stops_both_processes_at_one_step(tmp_path):
    pytest.importorskip("transformers")
    words = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--as_accelerate", "--cpu"]
    words += ["--num_processes=2", str(ROOT / "scripts" / "wedge_trainer.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    progress = tmp_path / "progress"
    progress.touch()
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as launcher:
        while progress.stat().st_size < 5 and launcher.poll() is None:
            time.sleep(0.01)
        launcher.send_signal(signal.SIGTERM)
        said = launcher.communicate()[1]
    assert launcher.returncode == 128 + signal.SIGTERM, said  # as launchers end
    newest = newest_whole(tmp_path / "run")
    assert newest is not None
    assert newest.endswith(f"checkpoint-{progress.stat().st_size}")
    assert not (tmp_path / "weights").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_go_on_with_the_samples_that_one_has_left(tmp_path):
    pytest.importorskip("transformers")
    script = str(HERE / "sample_order.py")
    # Stopped in the middle of the second epoch.
    run("-m", "accel_callbacks.as_accelerate", script, str(tmp_path), "4", "whole", "half:8")
    launch = ("-m", "accel_callbacks.cli", "launch", "--as_accelerate", "--cpu")
    run(*launch, "--num_processes=2", script, str(tmp_path), "2", "half")

    def seen(name: str) -> list[list[int]]:
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    whole = seen("whole/seen_1_0")
    assert seen("half/seen_1_0") == whole[:8]
    pairs = zip(seen("half/seen_2_0"), seen("half/seen_2_1"), strict=True)
    assert [own + other for own, other in pairs] == whole[8:]


def checkpoint(folder: Path, step: int, state: str = "{}") -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(state)
    return path


def test_what_others_have_cut_off_is_passed_over(tmp_path, capsys):
    assert newest_whole(tmp_path) is None
    whole = checkpoint(tmp_path, 9)
    (checkpoint(tmp_path, 10) / "optimizer.pt").write_bytes(b"PK\x03\x04 half")
    header = b'{"w": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}'
    weights = len(header).to_bytes(8, "little") + header + b"12345678"
    (checkpoint(tmp_path, 11) / "model.safetensors").write_bytes(weights)
    checkpoint(tmp_path, 12, '{"epoch": 1')
    (tmp_path / "checkpoint-99").write_text("no folder")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "_accel_saving" / "checkpoint-13").mkdir(parents=True)
    assert newest_whole(tmp_path) == str(whole)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path}/checkpoint-10 is passed over: its optimizer.pt is cut off" in said
    assert f"{tmp_path}/checkpoint-11 is passed over: its model.safetensors is cut off" in said
    assert f"{tmp_path}/checkpoint-12 is passed over: its trainer_state.json is missing or" in said
    (tmp_path / "checkpoint-11" / "model.safetensors").write_bytes(weights + b"9")
    assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-11")


def test_a_sealed_one_that_lacks_a_file_is_passed_over(tmp_path):
    for step in (1, 2):
        (checkpoint(tmp_path, step) / "optimizer.pt").write_bytes(b"any")
        seal_folder(tmp_path / f"checkpoint-{step}", {"step": step})
    assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-1")
