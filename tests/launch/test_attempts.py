"""Which failures are worth another attempt, what attempts cost, and what a launch says of it."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accel_callbacks.errors import RemoteError, ResumeError
from accel_callbacks.launch.attempts import Attempts
from accel_callbacks.recurrence import fingerprint, note_step, reason_to_recur, step_of
from tests.cli.conftest import clean_environment
from tests.support import warm

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass
class Failed:
    """As torch's launcher describes a process that has failed."""

    exitcode: int
    extra: dict[str, Any] = field(default_factory=dict)
    summary: str = ""
    local_rank: int = 0
    pid: int = 4242
    timestamp: int = 100

    @property
    def message(self) -> object:
        return {"message": self.summary, "extraInfo": self.extra} if self.summary else "none"


def attempts(restarts: int = 3, preemptions: int = 2) -> Attempts:
    return Attempts(restarts, preemptions, False)


def error_at(step: int | None, mark: str = "a", **extra: Any) -> dict[int, Failed]:
    facts = {"fingerprint": mark, "step": step, **extra}
    return {0: Failed(1, facts, "ValueError: bad sample")}


def test_the_same_error_at_the_same_step_twice_ends_a_launch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = attempts()
    ended.begin()
    assert ended.fail(error_at(7), 3) == (True, True)
    ended.begin()
    assert ended.fail(error_at(8), 2) == (True, True)  # another step
    ended.begin()
    assert ended.fail(error_at(8, "b"), 2) == (True, True)  # another error
    ended.begin()
    assert ended.fail(error_at(8, "b"), 2) == (False, True)
    assert "at the same step (8) in the attempt before" in capsys.readouterr().err


@pytest.mark.parametrize(
    "failures",
    [
        error_at(None),  # outside of a run: such as data that is not mounted yet
        error_at(7, ""),  # of the network
        error_at(7, follows=True),  # of another rank
        {0: Failed(-9)},
    ],
)
def test_what_may_not_come_again_is_tried_each_time(
    failures: dict[int, Failed],
) -> None:
    ended = attempts()
    for left in (3, 2, 1):
        ended.begin()
        assert ended.fail(failures, left) == (True, True)
    ended.begin()
    assert ended.fail(failures, 0) == (False, True)


@pytest.mark.parametrize(
    "failures",
    [
        {1: Failed(-15)},
        {0: Failed(75), 1: Failed(75)},
        {
            0: Failed(1, {"follows": True}, "RuntimeError: Connection closed by peer"),
            1: Failed(-15),
        },
    ],
)
def test_preemptions_have_a_budget_of_their_own(
    failures: dict[int, Failed],
) -> None:
    ended = attempts()
    for _ in range(2):
        ended.begin()
        assert ended.fail(failures, 0) == (True, False)
    ended.begin()
    assert ended.fail(failures, 1) == (True, True)  # now it counts
    never = attempts(restarts=0)
    never.begin()
    assert never.fail(failures, 0)[0] is False


def test_a_rank_that_fails_by_itself_is_no_preemption_though_the_launcher_stops_others() -> None:
    ended = attempts()
    ended.begin()
    failures = {0: Failed(-15), **{1: error_at(3)[0]}}
    assert ended.fail(failures, 3) == (True, True)


def _disk_full() -> Exception:
    error = RuntimeError("the save failed")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


def test_which_errors_come_again() -> None:
    at_a_step = ValueError("no class 7")
    note_step(at_a_step, 7)
    for error, reason in (
        (SyntaxError("x"), "cannot be parsed"),
        (ModuleNotFoundError("x"), "the import fails at each start"),
        (_disk_full(), "the disk is full"),
        (ResumeError("x"), ""),
    ):
        assert reason in reason_to_recur(error, None) != ""
    for other in (at_a_step, ValueError("x"), KeyError("x"), OSError(errno.EIO, "x")):
        assert reason_to_recur(other, None) == ""
    assert step_of(at_a_step) == 7
    note_step(at_a_step, 8)
    assert step_of(at_a_step) == 7
    assert fingerprint(ValueError("at 0x7f01"), None) == fingerprint(ValueError("at 0x7f02"), None)
    assert fingerprint(ValueError("1"), None) != fingerprint(ValueError("2"), None)
    assert fingerprint(FileNotFoundError("x"), None)
    for passing in (ConnectionResetError("x"), TimeoutError("x")):
        assert fingerprint(passing, None) == ""
    assert fingerprint(RemoteError(rank=1, where="x", details="y"), None) == ""


def test_a_wrong_option_of_ours_comes_again() -> None:
    from accel_callbacks import Accelerator

    with pytest.raises(ValueError, match="fp17") as caught:
        Accelerator(cpu=True, mixed_precision="fp17")
    assert "option" in reason_to_recur(caught.value, caught.value.__traceback__)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Launch a script on one process that may be restarted three times; started warm."""

    def run(text: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(text)
        words = ["--cpu", "--max_restarts", "3", *options, "train.py"]
        return warm.run(
            [sys.executable, "-m", "accel_callbacks.cli", "launch", *words],
            cwd=tmp_path,
            env=clean_environment(tmp_path),
            capture_output=True,
            text=True,
            warm_children=True,
        )

    return run


RUN = """
import os, signal, torch
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
accel = Accelerator(cpu=True, project_dir="runs", callbacks=[Checkpoint(every_n_steps=2)])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2)
model, optimizer, data = accel.prepare(model, optimizer, data)
print(f"attempt {attempt}", flush=True)
with accel.run("attempts") as run:
    for batch in data:
        accel.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if run.global_step == 5:
            END
accel.end_training()
"""


def test_a_launch_ends_at_the_second_of_the_same_errors(launch: Launch) -> None:
    done = launch(RUN.replace("END", "raise KeyError('no class 7')"))
    assert done.returncode == 1
    assert done.stdout.split() == ["attempt", "0", "attempt", "1"]
    assert "no restart: the same error came at the same step (5)" in done.stderr
    assert "accel launch: attempt 1 took" in done.stderr
    assert "2 attempts took" in done.stderr


def test_an_error_of_each_start_ends_a_launch_at_once(launch: Launch) -> None:
    """One that comes before the script runs; test_which_errors_come_again has the others."""
    done = launch("if True print(1)")
    assert done.returncode == 1
    assert done.stderr.count("rank 0 of 1 failed") == 1
    assert "cannot be parsed" in done.stderr


def test_a_sigterm_counts_apart_and_attempts_and_goodput_are_told(launch: Launch) -> None:
    end = "attempt < 2 and os.kill(os.getpid(), [signal.SIGTERM, signal.SIGKILL][attempt])"
    done = launch(RUN.replace("END", end), "--max_restarts", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1::2] == ["0", "1", "2"]
    assert "rank 0 was killed by SIGTERM; a preemption, restarting, 99 more" in done.stderr
    assert "rank 0 was killed by SIGKILL; restarting, 0 restarts left" in done.stderr
    assert "attempt 3 took" in done.stderr
    assert "3 attempts took" in done.stderr
    assert "goodput" in done.stderr


def test_one_attempt_is_told_nothing_about(launch: Launch) -> None:
    done = launch("print('done')")
    assert (done.returncode, done.stderr) == (0, "")


def test_quiet_tells_nothing(launch: Launch) -> None:
    done = launch("import no_such_package", "-q")
    assert done.returncode == 1
    assert "accel launch:" not in done.stderr
