"""The rank that a report names, and its text."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from accel_callbacks.launch.report import exit_code, failure_report, root_cause


@dataclass
class Failed:
    exitcode: int
    timestamp: int = 100
    local_rank: int = 0
    pid: int = 4242
    message: object = "To enable traceback see: ..."


def test_exit_codes_follow_the_shell() -> None:
    assert [exit_code(code) for code in (1, 3, -9, -15)] == [1, 3, 137, 143]


def test_the_first_one_is_the_cause() -> None:
    assert root_cause({0: Failed(1, timestamp=9), 1: Failed(1, timestamp=8)}) == 1


def test_a_kill_is_the_cause_of_its_peers_errors() -> None:
    assert root_cause({0: Failed(1), 1: Failed(-signal.SIGKILL)}) == 1
    # An abort of gloo at exit is what happens to a peer.
    assert root_cause({0: Failed(1), 1: Failed(-signal.SIGABRT)}) == 0


def test_a_peer_that_the_launcher_stopped_is_not_the_cause() -> None:
    failures = {0: Failed(-signal.SIGTERM), 1: Failed(23), 2: Failed(-signal.SIGTERM)}
    assert root_cause(failures) == 1
    text = failure_report(failures, "s.py", None)
    assert "then stopped by the launcher: rank 0, rank 2" in text
    assert "also failed" not in text


def test_report_has_the_message_of_the_rank() -> None:
    message = {"message": "ValueError: boom", "extraInfo": {}}
    text = failure_report({0: Failed(7), 3: Failed(3, 99, 1, 77, message)}, "s.py", None)
    assert "rank 3 exited with code 3 (local rank 1, pid 77)" in text
    assert "ValueError: boom" in text
    assert "also failed: rank 0 exited with code 7" in text
    assert "To enable traceback" not in text


def test_report_points_to_the_log_of_the_rank(tmp_path: Path) -> None:
    for attempt, rank in ((0, 0), (0, 1)):
        log = tmp_path / "none_x" / f"attempt_{attempt}" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text("Traceback")
    text = failure_report({1: Failed(1, local_rank=1)}, "s.py", str(tmp_path))
    assert str(tmp_path / "none_x" / "attempt_0" / "1" / "stderr.log") in text


def test_sigkill_has_a_hint() -> None:
    assert "memory" in failure_report({0: Failed(-signal.SIGKILL)}, "s.py", None)


def test_unknown_signal_number() -> None:
    assert "signal 120" in failure_report({0: Failed(-120)}, "s.py", None)


@pytest.mark.parametrize("code", [3221225477, -1073741819])
def test_a_crash_on_windows_is_named_and_comes_before_its_peers(code: int) -> None:
    failures = {0: Failed(1), 1: Failed(code), 2: Failed(3221225786)}
    assert root_cause(failures) == 1
    text = failure_report(failures, "s.py", None)
    assert "rank 1 ended with status 0xC0000005 (an access violation)" in text
    assert "then stopped by the launcher: rank 2" in text
    assert exit_code(code) == 139


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0xC000013A, 130), (0xC0000135, 1), (0xDEADBEEF, 1), (-(2**31), 1), (-64, 192), (255, 255)],
)
def test_no_exit_code_is_huge(code: int, expected: int) -> None:
    assert exit_code(code) == expected


def test_an_unknown_status_is_shown_as_it_is() -> None:
    assert "status 0xDEADBEEF (local" in failure_report({0: Failed(0xDEADBEEF)}, "s.py", None)
