"""What the launcher would do, without starting anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from accel_callbacks.cli import launch
from accel_callbacks.cli.launch_plan import LaunchPlan, build_plan
from accel_callbacks.cli.options import CommandError, CommandParser


def plan(
    *words: str, environ: Mapping[str, str] | None = None, cores: int = 8, gpus: int = 0
) -> LaunchPlan:
    parser = CommandParser("accel launch", "")
    launch.configure(parser)
    return build_plan(parser.parse(words), environ or {}, cores, lambda: gpus)


def value(built: LaunchPlan, flag: str) -> str:
    return built.torchrun[built.torchrun.index(flag) + 1]


def test_defaults_are_one_process_and_nothing_asked() -> None:
    built = plan("-m", "timeit")
    assert value(built, "--nproc-per-node") == "1"
    assert "--standalone" in built.torchrun
    assert built.env == {"OMP_NUM_THREADS": "8"}


@pytest.mark.parametrize(
    ("words", "gpus", "processes"),
    [((), 4, "4"), (("--cpu",), 4, "1"), (("--num_processes", "2", "--cpu"), 0, "2")],
)
def test_number_of_processes(words: tuple[str, ...], gpus: int, processes: str) -> None:
    assert value(plan(*words, "-m", "timeit", gpus=gpus), "--nproc-per-node") == processes


def test_asked_settings_reach_the_children() -> None:
    words = "--cpu --mixed-precision bf16 --gradient_accumulation_steps 4 --max_restarts 2"
    assert plan(*words.split(), "-m", "timeit").env == {
        "OMP_NUM_THREADS": "8",
        "ACCEL_CPU": "1",
        "ACCEL_MIXED_PRECISION": "bf16",
        "ACCEL_GRADIENT_ACCUMULATION_STEPS": "4",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


@pytest.mark.parametrize(
    ("words", "environ", "threads"),
    [
        ("--num_processes 3", {}, "2"),
        ("--num_processes 64", {}, "1"),
        ("--num_processes 3", {"OMP_NUM_THREADS": "5"}, None),
        ("--num_cpu_threads_per_process 7", {"OMP_NUM_THREADS": "5"}, "7"),
    ],
)
def test_threads(words: str, environ: dict[str, str], threads: str | None) -> None:
    built = plan(*words.split(), "-m", "timeit", environ=environ)
    assert built.env.get("OMP_NUM_THREADS") == threads


def test_several_machines() -> None:
    words = "--num_processes 6 --num_machines 2 --machine_rank 1 --main_process_ip node0"
    built = plan(*words.split(), "-m", "timeit")
    expected = {"--nnodes": "2", "--nproc-per-node": "3", "--node-rank": "1"}
    expected |= {"--master-addr": "node0", "--master-port": "29500", "--rdzv-backend": "static"}
    assert {flag: value(built, flag) for flag in expected} == expected
    assert built.env["OMP_NUM_THREADS"] == "2"


def test_one_machine_with_a_port() -> None:
    built = plan("--main_process_port", "4242", "-m", "timeit")
    assert value(built, "--master-port") == "4242"
    assert "--standalone" not in built.torchrun
    assert "--standalone" in plan("--main_process_port", "0", "-m", "timeit").torchrun


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num_machines 2 --num_processes 2 -m timeit", "--main_process_ip"),
        ("--num_machines 2 --num_processes 3 --main_process_ip a -m timeit", "multiple of"),
        ("--num_machines 2 --num_processes 1 --main_process_ip a -m timeit", "multiple of"),
        ("--machine_rank 1 -m timeit", "from 0 to 0"),
        ("-m --no_python timeit", "exclude each other"),
        ("absent.py", "not a file"),
        ("-m absent_module.sub", "not a module"),
        ("--no_python absent_program", "not an executable"),
    ],
)
def test_mistakes_are_told_before_anything_starts(words: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        plan(*words.split())


def test_module_beside_the_caller_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert plan("-m", "only_here").script == "only_here"


def test_arguments_of_the_script_are_not_read() -> None:
    words = ["--", "--num_processes", "9", "-m", "--", "a b"]
    built = plan("-m", "timeit", *words)
    assert list(built.script_args) == words
    assert value(built, "--nproc-per-node") == "1"


def test_shell_form_quotes() -> None:
    assert plan("-m", "timeit", "a b").as_shell().endswith("timeit 'a b'")


@pytest.mark.parametrize("text", ["4", "0:9", "stdout", ""])
def test_streams_are_checked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan("--tee", text, "-m", "timeit")
    assert "0:1,1:3" in capsys.readouterr().err


def test_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TEST_KEPT", "before")
    before = dict(os.environ)

    def meddle() -> None:
        with launch._environment({"ACCEL_TEST_KEPT": "during"}):
            assert os.environ["ACCEL_TEST_KEPT"] == "during"
            os.environ["ACCEL_TEST_ADDED"] = "by torch"
            del os.environ["PATH"]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        meddle()
    assert dict(os.environ) == before
