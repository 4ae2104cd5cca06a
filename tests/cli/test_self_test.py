"""``accel test``: checks pass on a sound installation, and each fails on a faulty one."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks.addons.selftest import checks
from accel_callbacks.addons.selftest.__main__ import main as selftest
from accel_callbacks.addons.selftest.check import Check, Expectations, Failed, Lab, Skipped
from accel_callbacks.addons.selftest.checks import CHECKS
from accel_callbacks.addons.selftest.runner import run_checks
from accel_callbacks.cli.main import main
from accel_callbacks.cli.test import CHECKS as NAMES
from tests.support import warm

Run = Callable[..., "subprocess.CompletedProcess[str]"]

FAULTY = """
import contextlib, json, sys
import torch
from accel_callbacks import Accelerator, collectives
from accel_callbacks.distributed import failures
from accel_callbacks.addons.selftest import checks
from accel_callbacks.addons.selftest.__main__ import main as selftest
from accel_callbacks.addons.selftest.check import Check, Lab
from accel_callbacks.addons.selftest.runner import run_checks
from accel_callbacks.addons.selftest.checks import CHECKS
from accel_callbacks.distributed.topology import destroy_topology, process_rank

rank = process_rank()[0]
here = rank == 1
reduce, row = collectives.reduce, checks.TensorDataset.__getitem__
FAULTS = {
    "processes": [(checks.platform, "python_version", lambda: f"3.{rank}")],
    "collectives": [(collectives, "reduce", lambda x, how: reduce(x, how) + here)],
    "determinism": [(checks, "set_seed", lambda seed: None)],
    "data": [(Accelerator, "prepare_data_loader", lambda self, loader, place: loader)],
    "workers": [(checks.TensorDataset, "__getitem__", lambda self, n: (torch.cat([
        row(self, n)[0][:-1], torch.tensor([n + here])]),))],
    "precision": [(Accelerator, "autocast", lambda self: contextlib.nullcontext())],
    "gradients": [(torch.nn.parallel.DistributedDataParallel, "forward",
                   lambda self, *inputs: self.module(*inputs))],
    "accumulation": [(Accelerator, "accumulate", lambda self, model: contextlib.nullcontext())],
    "checkpoint": [(Accelerator, "load_state", lambda self, folder: None)],
}
failures._PATIENCE = 0.5
lab, found = Lab(20, sys.argv[1]), {}
assert list(FAULTS) == list(CHECKS)
for name, faults in FAULTS.items():
    before = [(owner, key, getattr(owner, key)) for owner, key, _ in faults]
    for owner, key, wrong in faults:
        setattr(owner, key, wrong)
    found[name] = [(o.status, o.details, o.advice) for o in run_checks([CHECKS[name]], lab)]
    for owner, key, right in before:
        setattr(owner, key, right)

def raising(lab):
    if here:
        raise ZeroDivisionError("on one")
    collectives.reduce(torch.ones(1), "sum")
    return ""

raises = [Check("raises", raising, "do this"), CHECKS["data"]]
found["raises"] = [(o.status, o.details, o.advice) for o in run_checks(raises, lab)]
with open(f"found{rank}", "w") as file:
    json.dump(found, file)
destroy_topology()
"""

SHOWN = {
    "processes": "differ in python: 3.0, 3.1",
    "collectives": "rank 1: reduce sum gave [2.0, 2.0] in place of [1.0, 1.0]",
    "determinism": "the same seed gave other weights the second time",
    "data": "more than once",
    "workers": "rank 1: sample",
    "precision": "products are torch.float32, not torch.bfloat16",
    "gradients": "ranks [1] have other weights than rank 0",
    "accumulation": "differ by",
    "checkpoint": "weights after the resume differ",
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run each check with its fault on two processes; what each of them saw."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.py").write_text(FAULTY)
    launch = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--cpu", "--num_processes=2"]
    words = ["--mixed_precision=bf16", "--num_cpu_threads_per_process=1", "faulty.py", str(folder)]
    done = warm.run(
        [*launch, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        warm_children=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"found{rank}").read_text()) for rank in range(2)]


@pytest.mark.distributed
def test_each_check_can_be_seen_failing(faulty: list[dict[str, Any]]) -> None:
    for name in NAMES:
        (mine,), (other,) = (found[name] for found in faulty)
        assert mine == other, name
        status, details, advice = mine
        assert (name, status) == (name, "FAILED")
        assert SHOWN[name] in details, name
        assert advice == CHECKS[name].advice


@pytest.mark.distributed
def test_an_error_on_one_process_fails_the_check_on_all(faulty: list[dict[str, Any]]) -> None:
    for found in faulty:
        first, second = found["raises"]
        assert first == ["FAILED", "rank 1: ZeroDivisionError: on one", "do this"]
        assert second[:2] == ["not run", "the process group was aborted in raises"]


@pytest.mark.distributed
def test_all_holds_on_two_processes(warm_accel: Run, tmp_path: Path) -> None:
    words = ["--cpu", "--num_processes", "2", "--mixed_precision", "bf16", "--folder", "kept"]
    done = warm_accel("test", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in NAMES]
    assert "2 processes on 1 machine, cpu, gloo, precision bf16" in lines[0]
    assert "all_reduce on cpu by gloo" in lines[1]
    assert last == "9 checks hold"
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.distributed
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_holds_for_stages_of_a_pipeline(warm_accel: Run, shards: int) -> None:
    words = ["--use_parallelism_config", "--parallelism_config_pp_size=2"]
    words += ["--cpu", f"--num_processes={2 * shards}"]
    words += [f"--parallelism_config_dp_shard_size={shards}"] * (shards > 1)
    done = warm_accel("test", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in NAMES]
    assert "pp 2" in lines[0]
    assert last == "9 checks hold"


def test_a_model_has_a_layer_for_each_stage() -> None:
    short, long = checks.small_model(), checks.small_model(stages=7)
    assert (len(short), len(long)) == (5, 7)
    assert torch.equal(short[0].weight, long[0].weight)


@pytest.mark.slow  # by default: in this process, below
@pytest.mark.distributed
def test_a_failed_check_is_reported_with_advice(accel: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "own.yaml").write_text("use_cpu: true\ngradient_accumulation_steps: 3\n")
    words = ["--config_file", "own.yaml", "--checks", "checkpoint,accumulation"]
    done = accel("test", *words, "--folder", "file", OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("FAILED   checkpoint")
    assert "file/accel-test-" in lines[0]
    assert lines[1].startswith("         what to do: check the free space")
    assert lines[2].startswith("ok       accumulation")
    assert "windows of 3" in lines[2]
    assert lines[3:] == ["1 of 2 checks do not hold: checkpoint"]
    assert "Traceback" not in done.stderr


KILLED = """
import os, signal, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "accel_callbacks.addons.selftest.checks":
            os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Hook())
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_process_that_dies_is_no_success(accel: Run, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    words = ["--cpu", "--num_processes", "2", "--checks", "collectives", "--json"]
    done = accel("test", *words, OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path))
    assert done.returncode == 137
    assert "accel test: the processes ended" in done.stderr
    assert json.loads(done.stdout)["holds"] is False


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the checks in this process instead of launching one."""

    def launch(args: Namespace) -> int:
        monkeypatch.setenv("ACCEL_CPU", "1")
        return selftest(args.program[1:])

    monkeypatch.setattr("accel_callbacks.cli.launch.run", launch)


@pytest.mark.usefixtures("in_process")
def test_a_check_that_fails_is_exit_code_1(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    words = ["--checks", "checkpoint,data", "--folder", str(tmp_path / "file")]
    assert main(["test", *words]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("FAILED   checkpoint")
    assert lines[1].startswith("         what to do: check the free space")
    assert lines[2].startswith("ok       data")
    assert lines[3:] == ["1 of 2 checks do not hold: checkpoint"]


@pytest.mark.usefixtures("in_process")
def test_json_is_all_there_is_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--checks", "accumulation,data", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["holds"] is True
    assert [(one["name"], one["status"]) for one in report["checks"]] == [
        ("accumulation", "ok"),
        ("data", "ok"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checks", "dta"], "there is no check 'dta' (did you mean 'data'?)"),
        (["script.py"], "accel test runs its own program, and was given 'script.py'"),
        (["--no_python"], "accel test runs its own program"),
        (["--patience", "0"], "'0' is not a number of seconds"),
        (["--num_proceses", "2"], "did you mean '--num_processes'?"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["test", *words]) == 2
    assert message in capsys.readouterr().err


def test_dry_run_shows_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cpu", "--num_processes", "2", "--patience", "5", "--folder", "x"]
    assert main(["test", *words, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "--module accel_callbacks.addons.selftest" in shown
    assert "--patience=5" in shown
    assert "--folder=x" in shown


def test_the_command_knows_the_checks() -> None:
    assert tuple(CHECKS) == NAMES
    assert all(check.advice for check in CHECKS.values())


def one(run: Callable[[Lab], str], **options: Any) -> tuple[str, str, str]:
    (outcome,) = run_checks([Check("it", run, "do this")], Lab(**options))
    return outcome.status, outcome.details, outcome.advice


def test_verdicts() -> None:
    def failing(lab: Lab) -> str:
        raise Failed("wrong")

    def skipping(lab: Lab) -> str:
        raise Skipped("nothing here")

    def raising(lab: Lab) -> str:
        raise OSError("no room\nmore")

    assert one(lambda lab: "seen") == ("ok", "seen", "")
    assert one(failing) == ("FAILED", "rank 0: wrong", "do this")
    assert one(skipping) == ("skipped", "nothing here", "")
    assert one(raising) == ("FAILED", "rank 0: OSError: no room", "do this")


def test_several_machines_without_a_folder_skip_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCEL_CPU", "1")
    (outcome,) = run_checks([CHECKS["checkpoint"]], Lab(folder=None))
    assert outcome.status == "skipped"
    assert "--folder" in outcome.details


def test_expectations_collect_problems() -> None:
    expect = Expectations()
    expect.equal("a", 1, 2)
    expect.that(True, "no")
    with pytest.raises(Failed, match="a gave 1 in place of 2"):
        expect.done()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([("cpu", ""), ("cpu", "")], "cpu"),
        ([("cuda", "NVIDIA L4")], "cuda (NVIDIA L4)"),
        ([("cuda", "NVIDIA L4")] * 4, "cuda (4 x NVIDIA L4)"),
        ([("cuda", "NVIDIA L4"), ("cuda", "Tesla T4")], "cuda (NVIDIA L4, Tesla T4)"),
    ],
    ids=["cpu", "one", "four", "two kinds"],
)
def test_the_gpus_of_all_ranks_are_named(ranks: list[tuple[str, str]], text: str) -> None:
    assert checks._devices([{"kind": kind, "gpu": gpu} for kind, gpu in ranks]) == text


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((7, 5), ["7.5", "bf16 is emulated", "fp16", "no fp8"]),
        ((8, 0), ["8.0", "no fp8"]),
        ((9, 0), []),
    ],
    ids=str,
)
def test_low_precisions_that_a_gpu_lacks_are_said(
    capability: tuple[int, int], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    text = checks._capability_note(torch.device("cuda", 0))
    assert all(word in text for word in words)
    assert bool(text) is bool(words)
    assert ("emulated" in text) is (capability < (8, 0))
    assert checks._capability_note(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("config", "kind", "name"),
    [("cpu:gloo,cuda:nccl", "cuda", "nccl"), ("cpu:gloo,cuda:nccl", "cpu", "gloo")],
)
def test_the_backend_of_a_device_is_named(
    config: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: config)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "undefined")
    assert checks._backend_of(torch.device(kind)) == name


def test_an_all_reduce_that_does_not_add_up_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        def wait(self) -> None:
            pass

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, async_op: Done())
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl,cpu:gloo")
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "undefined")
    expect = Expectations()
    checks._all_reduce_on_device(expect, torch.device("cpu"), 0, 2)
    assert "all_reduce on the device gave [1.0, 1.0, 1.0, 1.0]" in expect.problems[0]
