"""`survive`: who has lost a peer goes on in its process, and comes to the same end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from accel_callbacks.launch.survivors import Survivors
from accel_callbacks.launch_notes import SURVIVOR
from tests.cli.conftest import clean_environment
from tests.support import warm
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import survive_proof  # noqa: E402

JOB = str(ROOT / "scripts" / "survive_job.py")
#: `accel` that waits for a survivor for a second only.
IMPATIENT = (
    "import sys; from accel_callbacks.launch import survivors; survivors._PATIENCE = 1.0;"
    "from accel_callbacks.cli.main import main; sys.exit(main())"
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are lost by signals"),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="compares runs on the CPU"),
]


@pytest.fixture(autouse=True)
def warm_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start launchers and their ranks in milliseconds."""

    def start(words: list[str], **options: Any) -> Any:
        env = {**clean_environment(tmp_path), "OMP_NUM_THREADS": "1"}
        return warm.run(words, warm_children=True, **{**options, "env": env})

    monkeypatch.setattr(subprocess, "run", start)


def launched(*words: str, start: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, *start, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done


def shell(env: dict[str, str], **_: Any) -> SubprocessHandler:
    """Start a shell with the command of an environment."""
    words = ("-c", env["command"])
    return SubprocessHandler("sh", words, {}, None, None, local_rank_id=0, numa_options=None)


@pytest.mark.parametrize(
    ("follows", "patience", "codes"),
    [
        (True, 60.0, [1, 3]),  # the one that was lost ends by itself
        (True, 0.1, [1, None]),  # it hangs
        (False, 60.0, [1, None]),  # an error of its own
    ],
)
def test_a_rank_ends_no_sooner_than_the_one_that_it_has_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    follows: bool,
    patience: float,
    codes: list[int | None],
) -> None:
    monkeypatch.setattr("accel_callbacks.launch.survivors._HEAD_START", patience)
    survivors = Survivors(tmp_path, shell, print)
    record = {"message": {"extraInfo": {"follows": follows, "told_by": 5}}}
    (tmp_path / "error.json").write_text(json.dumps(record))
    free = tmp_path / "free"
    waits = f"while [ ! -e {free} ]; do sleep 0.01; done; exit 3"
    workers = [
        survivors.start(
            env={
                "command": command,
                "RANK": str(rank + 4),
                "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
            },
            local_rank_id=rank,
            stdout=None,
            stderr=None,
        )
        for rank, command in enumerate(("exit 1", waits))
    ]
    follower, lost = workers
    follower.handler.proc.wait(60)
    if codes[1] is not None:
        assert follower.poll() is None
        free.touch()
        lost.handler.proc.wait(60)
    deadline = time.monotonic() + 30
    while follower.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [worker.poll() for worker in workers] == codes
    for worker in workers:
        worker.close(signal.SIGKILL)


def test_what_a_killed_rank_has_left_is_ended(tmp_path: Path) -> None:
    survivors = Survivors(tmp_path, shell, print)
    child = tmp_path / "child"
    dies = f"sleep 600 & echo $! > {child}; kill -9 $$"
    for rank, command in enumerate(("sleep 600", dies)):
        stated = {"env": {"command": command}, "local_rank_id": rank}
        worker = survivors.start(**stated, stdout=None, stderr=None)
    assert worker.wait(60) == -signal.SIGKILL
    with survivors.kept(awaited=True):
        os.kill(int(child.read_text()), 0)  # nobody else survives
    survivor = survivors._workers[0]
    (tmp_path / SURVIVOR.format(survivor.pid)).write_text('{"waits": true}')
    with survivors.kept(awaited=True):
        survivor.close(signal.SIGTERM)
        assert survivor.wait(60) == 0
    assert survivor.survived
    left = Path(f"/proc/{child.read_text().strip()}/stat")
    deadline = time.monotonic() + 30
    while left.exists() and " Z " not in left.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left.exists() or " Z " in left.read_text()
    survivors.dismiss()
    survivor.close(signal.SIGTERM)
    assert survivor.wait(60) == -signal.SIGTERM


def pids(facts: list[dict[str, Any]]) -> dict[int, int]:
    return {fact["attempt"]: fact["pid"] for fact in facts}


def test_the_survivor_keeps_its_pid_and_the_run_its_weights_and_samples(tmp_path: Path) -> None:
    whole = survive_proof.run(tmp_path / "whole", options="--epochs 2")
    options = "--epochs 2 --losses 3 --ranks 110"
    lost = survive_proof.run(tmp_path / "lost", options=options, restarts=3)
    first, second = (pids(facts) for facts in lost.facts)
    assert first[0] == first[1] == first[2] != first[3]
    assert len({*second.values()}) == 3
    assert second[2] == second[3]
    assert lost.printed.count("1 of 2 processes survived") == 3
    assert lost.weights == whole.weights
    assert lost.samples == whole.samples
    for facts in (lost.facts[0][1:3], lost.facts[1][2:4]):
        before, after = facts
        assert before["threads"] >= after["threads"]
        assert before["descriptors"] + 2 >= after["descriptors"]  # a save may have files open


def of_two_machines(tmp_path: Path, restarts: int, *options: str) -> tuple[list[int], list[str]]:
    """Start a launcher for each of two machines; return how they ended, and what they printed."""
    env = {**clean_environment(tmp_path), "OMP_NUM_THREADS": "1"}
    meet = [f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--nnodes=2", "--nproc_per_node=1"]
    words = ["-m", "accel_callbacks.cli", "launch", "--cpu", f"--max_restarts={restarts}", *meet]
    launchers = [
        warm.Popen(
            [sys.executable, *words, f"--rdzv_conf=is_host={host}", JOB, str(tmp_path), *options],
            warm_children=True,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in ("true", "false")
    ]
    printed = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    return [launcher.returncode for launcher in launchers], printed


def test_processes_of_other_machines_survive_as_well(tmp_path: Path) -> None:
    whole = survive_proof.run(tmp_path / "whole", options="--epochs 2")
    folder = tmp_path / "lost"
    folder.mkdir()
    codes, printed = of_two_machines(folder, 2, "--epochs", "2", "--losses", "2", "--ranks", "01")
    assert codes == [0, 0], "\n".join(printed)
    lost = survive_proof.result_of(folder, 2, "".join(printed))
    first, second = ([fact["pid"] for fact in facts] for facts in lost.facts)
    assert first[0] != first[1] == first[2]
    assert second[0] == second[1] != second[2]
    assert lost.printed.count("a rank of another machine is lost") == 2
    assert lost.printed.count("1 of 1 processes survived\n") == 2
    assert lost.weights == whole.weights
    assert lost.samples == whole.samples


def test_without_restarts_those_of_other_machines_end_with_the_loss(tmp_path: Path) -> None:
    # Rank 0 is where the launchers meet, which does not end by itself.
    codes, printed = of_two_machines(tmp_path, 1, "--epochs", "4", "--losses", "2", "--ranks", "1")
    assert sorted(codes) == [1, 128 + signal.SIGKILL], "\n".join(printed)
    (text,) = (text for text in printed if "LostRankError" in text)
    assert "1 of 1 processes survived\n" in text


@pytest.mark.slow
def test_shards_on_four_ranks_survive_as_well(tmp_path: Path) -> None:
    options = "--fsdp --epochs 2"
    whole = survive_proof.run(tmp_path / "whole", 4, options)
    lost = survive_proof.run(tmp_path / "lost", 4, f"{options} --losses 2 --ranks 20", restarts=2)
    assert [len({*pids(facts).values()}) for facts in lost.facts] == [2, 1, 2, 1]
    assert lost.printed.count("3 of 4 processes survived") == 2
    assert lost.weights == whole.weights
    assert lost.samples == whole.samples


def test_an_error_of_a_rank_is_its_own(tmp_path: Path) -> None:
    command = survive_proof.command_of(tmp_path, 2, "--losses 2 --how raise", 1)
    command[4:4] = ["--log_dir", str(tmp_path / "logs"), "--tee", "3"]
    done = launched(*command[3:], start=("-m", "accel_callbacks.cli"))
    assert done.returncode == 1
    logs = tmp_path.glob("logs/*/attempt_1/0/stderr.log")
    assert ["resumed from" in log.read_text() for log in logs] == [True]
    assert done.stdout.count("1 of 2 processes survived") == 1
    assert done.stdout.count("ValueError: of this rank alone") >= 2
    assert "rank 1 exited with code 1" in done.stdout


def test_who_waits_for_one_that_fails_before_it_joins_is_not_waited_for(tmp_path: Path) -> None:
    lost = survive_proof.run(tmp_path / "lost", options="--losses 1 --fails_first 1", restarts=2)
    assert "ValueError: of this rank alone" in lost.printed
    assert lost.printed.count("1 of 2 processes survived") == 1
    assert "does not survive the loss" not in lost.printed
    assert list(pids(lost.facts[0])) == [0, 2]


@pytest.mark.parametrize(
    ("options", "survived"), [("--stuck 0", 0), ("--how stop --timeout 3", 1)], ids=["one", "both"]
)
def test_who_hangs_is_replaced(tmp_path: Path, options: str, survived: int) -> None:
    command = survive_proof.command_of(tmp_path, 2, f"--losses 1 {options}", 1)
    done = launched(*command[3:], start=("-c", IMPATIENT))
    assert done.returncode == 0, done.stdout
    assert f"local rank {survived} (pid " in done.stdout
    assert "does not survive the loss" in done.stdout
    assert done.stdout.count("1 of 2 processes survived") == survived


def test_a_pause_that_is_taken_for_a_loss_costs_an_attempt_and_no_process(tmp_path: Path) -> None:
    whole = survive_proof.run(tmp_path / "whole")
    options = "--losses 1 --how pause --timeout 3"
    lost = survive_proof.run(tmp_path / "lost", options=options, restarts=1)
    assert "rank 1 has not answered for" in lost.printed
    assert "ranks lost each other; restarting, 0 restarts left" in lost.printed
    assert "2 of 2 processes survived\n" in lost.printed
    assert [len({*pids(facts).values()}) for facts in lost.facts] == [1, 1]
    assert lost.weights == whole.weights
    assert lost.samples == whole.samples


def test_without_the_launcher_the_loss_is_raised_with_what_to_do(tmp_path: Path) -> None:
    env = {**clean_environment(tmp_path), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        warm.Popen(
            [sys.executable, JOB, str(tmp_path), "--losses", "1"],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [1, -signal.SIGKILL]
    assert "survive: start the script with `accel launch --max_restarts N`" in printed[0]
    assert "LostRankError" in printed[0]
