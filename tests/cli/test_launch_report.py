"""The rank that a report names, and its text."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from accel_callbacks.launch.report import code_of, exit_code, failure_report, root_cause


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


def record(text: str, told_by: int | None = None) -> dict[str, object]:
    extra = {"py_callstack": f"Traceback\n{text}", "told_by": told_by}
    return {"message": text, "extraInfo": extra}


def test_an_error_that_one_rank_has_shown_is_not_shown_again() -> None:
    failures = {
        0: Failed(1, message=record("RuntimeError: lost", told_by=1)),
        1: Failed(1, message=record("ValueError: boom")),
    }
    text = failure_report(failures, "s.py", None)
    assert "Traceback" not in text
    assert "s.py failed: rank 1 exited with code 1" in text
    assert "also failed: rank 0 exited with code 1 with the same error" in text
    failures[0] = Failed(1, message=record("OSError: another"))
    assert failure_report(failures, "s.py", None).count("Traceback") == 1


def test_a_rank_that_was_stopped_while_it_ended_with_an_error_has_failed() -> None:
    failures = {
        0: Failed(1, timestamp=100, message=record("RemoteError: rank 1 failed", told_by=1)),
        1: Failed(
            -signal.SIGTERM, timestamp=101, message=record("ValueError: boom\nfirst\nsecond")
        ),
    }
    assert root_cause(failures) == 1
    assert code_of(failures[1]) == 1
    text = failure_report(failures, "s.py", None)
    assert "s.py failed: rank 1 exited with code 1" in text
    assert "  ValueError: boom ...\n" in text
    assert "also failed: rank 0 exited with code 1\n" in text
    assert "its traceback is above, on standard error of rank 1;" in text


def test_the_traceback_is_where_the_rank_is_that_has_shown_it() -> None:
    failures = {0: Failed(-signal.SIGTERM), 1: Failed(1, message=record("OSError: a", told_by=0))}
    text = failure_report(failures, "s.py", None)
    assert "s.py failed: rank 1 exited with code 1" in text
    assert "on standard error of rank 0;" in text


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
    assert "rank 1 ended with status 0xC0000005" in text
    assert "then stopped by the launcher: rank 2" in text
    assert exit_code(code) == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0xC000013A, 130), (0xC0000135, 1), (0xDEADBEEF, 1), (-(2**31), 1), (-64, 192), (255, 255)],
)
def test_no_exit_code_is_huge(code: int, expected: int) -> None:
    assert exit_code(code) == expected


def test_an_unknown_status_is_shown_as_it_is() -> None:
    assert "status 0xDEADBEEF (local" in failure_report({0: Failed(0xDEADBEEF)}, "s.py", None)
