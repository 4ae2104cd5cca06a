"""Torch's flight recorder: on in launches with GPUs and a log folder, named in errors of hangs."""

from __future__ import annotations

import pytest

from accel_callbacks.distributed import stack
from accel_callbacks.distributed.stack import dump_hang
from accel_callbacks.launch import environment
from tests.cli.test_launch_plan import plan

NEW = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"}
OLD = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}


def recorder(built) -> dict[str, str]:
    return {name: value for name, value in built.env.items() if name in NEW | OLD}


@pytest.mark.parametrize(
    ("torch", "names"),
    [("2.13.0+cu130", NEW), ("2.10.0", NEW), ("2.9.1+cu128", OLD), ("2.6.0", OLD)],
)
def test_a_launch_with_gpus_and_a_log_folder_records(tmp_path, monkeypatch, torch, names):
    monkeypatch.setattr(environment, "version", lambda name: torch)
    monkeypatch.chdir(tmp_path)
    found = recorder(plan("--log_dir", "logs", "-m", "timeit", gpus=2))
    assert set(found) == names
    assert sorted(found.values()) == [str(tmp_path / "logs" / "flight_recorder_rank_"), "1", "2000"]


@pytest.mark.parametrize("words", [["--log_dir", "logs", "--cpu"], ["--tee", "3"]])
def test_one_without_gpus_or_a_folder_does_not(words):
    assert recorder(plan(*words, "--num_processes", "2", "-m", "timeit", gpus=2)) == {}
    assert recorder(plan("--log_dir", "logs", "-m", "timeit", gpus=0)) == {}


@pytest.mark.parametrize("name", sorted(OLD | NEW))
def test_what_was_set_under_either_name_is_kept(name):
    found = recorder(plan("--log_dir", "logs", "-m", "timeit", gpus=2, environ={name: "7"}))
    assert len(found) == 2
    assert name not in found


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(stack, "_read_recording", lambda: b"what NCCL did")


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_a_hang_writes_the_dump_and_says_where(tmp_path, nccl, name):
    prefix = f"{tmp_path}/rank_"
    told = dump_hang(3, {name: prefix})
    assert told == f" What NCCL did last is in {prefix}*: torchfrtrace {tmp_path} -p rank_"
    assert (tmp_path / "rank_3").read_bytes() == b"what NCCL did"


def test_a_dump_that_torch_has_written_is_kept(tmp_path, nccl):
    (tmp_path / "rank_0").write_bytes(b"torch's own")
    assert dump_hang(0, {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"})
    assert (tmp_path / "rank_0").read_bytes() == b"torch's own"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TORCH_FR_DUMP_TEMP_FILE": "/nowhere/rank_"},
        {"TORCH_FR_DUMP_TEMP_FILE": "rank_", "TORCH_FR_BUFFER_SIZE": "0"},
    ],
)
def test_without_a_dump_nothing_is_said(tmp_path, monkeypatch, nccl, env):
    monkeypatch.chdir(tmp_path)
    assert dump_hang(0, env) == ""
    assert list(tmp_path.iterdir()) == []


def test_without_nccl_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(stack, "_read_recording", lambda: b"")
    assert dump_hang(0, {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}) == ""
    assert list(tmp_path.iterdir()) == []
