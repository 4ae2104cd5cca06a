"""Launches on a machine with and without GPUs."""

from __future__ import annotations

import pytest

from accel_callbacks.cli import launch
from accel_callbacks.cli.main import main
from accel_callbacks.launch import machine


@pytest.mark.parametrize(("word", "gpus", "count"), [("cpu", 4, 6), ("auto", 4, 4), ("auto", 0, 6)])
def test_processes_by_a_word(
    word: str,
    gpus: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "_count_devices", lambda: gpus)
    monkeypatch.setattr(launch, "usable_cores", lambda: 6)
    assert main(["launch", "--dry_run", "--nproc_per_node", word, "-m", "timeit"]) == 0
    assert f"--nproc-per-node {count} " in capsys.readouterr().out


def test_gpus_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_count_devices", lambda: 0)
    monkeypatch.setattr(machine, "has_driver", lambda kind, root: False)
    for words in (["--nproc_per_node", "gpu"], ["--multi_gpu", "--num_processes", "2"]):
        assert main(["launch", *words, "-m", "timeit"]) == 2
        assert "this machine shows no GPU" in capsys.readouterr().err
    # What would run on other machines can be looked at here.
    assert main(["launch", "--dry_run", *words, "-m", "timeit"]) == 0


def test_c15c_gpu_ids_without_a_gpu_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "has_driver", lambda kind, root: False)
    for ids in ("0", "0,1"):
        assert main(["launch", "--gpu_ids", ids, "-m", "timeit"]) == 2
        err = capsys.readouterr().err
        assert f"gpu_ids: {ids} (command line): this machine shows no GPU" in err
    assert main(["launch", "--dry_run", "--gpu_ids", "0,1", "-m", "timeit"]) == 0
    words = ["--gpu_ids", "0", "--use_cpu", "-m", "timeit", "-n1", "-r1"]
    assert main(["launch", *words]) == 0


def test_the_help_shows_what_turns_a_switch_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--help"]) == 0
    assert "turns --debug off" in capsys.readouterr().out


def test_an_option_without_effect_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--same_network", "--machine_rank", "0", "--fsdp_version", "1"]
    assert main(["launch", "--dry_run", *words, "-m", "timeit"]) == 0
    printed = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in printed] == [
        " --same_network has no effect",
        " --fsdp_version has no effect",
    ]
