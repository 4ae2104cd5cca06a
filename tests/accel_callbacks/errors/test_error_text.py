"""What is shown of an error: the user's frames whole, others in a line, causes that add a fact."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_callbacks.errors import RemoteError
from accel_callbacks.errors import text as error_text
from accel_callbacks.errors.text import folded_text, innermost_call, published_text, whole_text
from tests.support import warm


def caught(function: Callable[[], object]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def shown(error: Exception) -> str:
    return folded_text(error, error.__traceback__)


def wrong_shape() -> None:
    torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(4, 1))(torch.ones(1, 2))


def library_function(
    code: str, name: str = "checkpoint_io.storage.s3.client"
) -> Callable[[], None]:
    """Return a function of a module of a library."""
    namespace = {"__name__": name}
    exec(code, namespace)
    return namespace["function"]  # type: ignore[return-value]


def test_frames_of_torch_are_one_line_and_those_of_the_user_are_whole() -> None:
    error = caught(wrong_shape)
    whole = traceback.format_exception(error)
    text = shown(error)
    own = [part for part in whole if part.startswith(f'  File "{__file__}"')]
    assert len(own) == 2
    assert all(part in text for part in own)
    assert text.endswith(whole[-1])
    assert text.count(" frames in torch") == 1
    assert "torch/nn" not in text
    assert "to torch.nn.modules.linear, line" in text


def test_an_error_of_the_user_alone_is_as_python_shows_it() -> None:
    error = caught(lambda: int("no number"))
    assert shown(error) == whole_text(error, error.__traceback__)


def test_a_standard_module_that_the_user_calls_is_shown() -> None:
    import json

    error = caught(lambda: json.loads("{"))
    assert "json/decoder.py" in shown(error).replace("\\", "/")


UNREACHABLE = """
def function():
    try:
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except OSError as error:
            raise OSError("cannot connect to host store:9") from error
    except OSError as error:
        raise RuntimeError("s3://b at http://store:9: Cannot connect to host store:9.") from error
"""


def test_of_the_causes_in_libraries_only_a_new_fact_is_told_in_one_line_and_first() -> None:
    lines = shown(caught(library_function(UNREACHABLE))).splitlines()
    assert lines[0] == "ConnectionRefusedError: [Errno 111] Connection refused, which led to:"
    assert lines[1] == "Traceback (most recent call last):"
    assert [line for line in lines if "cannot connect" in line.lower()] == lines[-1:]


def test_a_cause_in_the_users_code_is_shown_as_python_does() -> None:
    def load() -> None:
        try:
            wrong_shape()
        except RuntimeError as error:
            raise ValueError("bad model") from error

    text = shown(caught(load))
    assert text.count("Traceback (most recent call last)") == 2
    assert "mat1 and mat2" in text
    assert "The above exception was the direct cause of the following exception" in text


def test_the_error_of_another_rank_has_the_place_where_this_one_was_and_no_cause() -> None:
    def backward() -> None:
        wrong_shape()

    def run() -> None:
        try:
            backward()
        except RuntimeError as error:
            raise RemoteError(rank=1, where="the run", details="ValueError: disk") from error

    error = caught(run)
    text = shown(error)
    assert "in backward" in text
    assert "mat1" not in text
    assert text.endswith("RemoteError: rank 1 failed in the run: ValueError: disk\n")
    call, place = innermost_call(error, error.__traceback__)
    assert call == "_wrapped_call_impl"
    assert place.startswith(f"{Path(__file__).name}:")


def test_frames_of_cpp_in_a_message_are_counted() -> None:
    frames = "".join(f"frame #{i}: c10::Error + 0x{i} (0x7f in libc10.so)\n" for i in range(30))
    text = shown(RuntimeError(f"no answer\nException raised from here (most recent):\n{frames}"))
    assert text.splitlines()[1:] == [
        "Exception raised from here (most recent):",
        "  ... 30 frames in C++",
    ]


def test_all_frames_are_shown_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    error = caught(wrong_shape)
    assert "_call_impl" not in published_text(error)
    monkeypatch.setenv("ACCEL_FULL_TRACEBACK", "1")
    assert published_text(error) == whole_text(error, error.__traceback__)


def test_a_fault_in_the_folding_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    error = caught(wrong_shape)
    monkeypatch.setattr(error_text, "_stack", lambda frames: 1 / 0)
    assert published_text(error) == whole_text(error, error.__traceback__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no groups")
def test_a_group_is_whole() -> None:
    error = caught(lambda: exec("raise ExceptionGroup('two', [OSError('a'), OSError('b')])"))
    assert shown(error) == whole_text(error, error.__traceback__)


# --- a script of one process ------------------------------------------------------------------

SCRIPT = """
import sys, traceback
import torch
{before}
from accel_callbacks import Accelerator

accel = Accelerator(cpu=True)
model = accel.prepare(torch.nn.Linear(2, 1))
{failure}
"""
BACKWARD = "accel.backward(torch.ones(1))"


def script(failure: str, before: str = "", **options: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(failure=failure, before=before)
    words, env = [sys.executable, "-c", code], {**os.environ, **options}
    return warm.run(words, capture_output=True, text=True, env=env)


def test_alone_only_an_error_that_went_through_this_library_is_folded() -> None:
    ours, plain = script(BACKWARD), script("torch.nn.Linear(2, 1)(torch.ones(3))")
    assert (ours.returncode, plain.returncode) == (1, 1)
    assert "frames in accel_callbacks and torch, to torch." in ours.stderr
    *_, note, message = ours.stderr.splitlines()
    assert note == "  all frames: set ACCEL_FULL_TRACEBACK=1"
    assert message.startswith("RuntimeError: ")
    assert "requires_grad" not in ours.stderr.partition("RuntimeError: ")[0]
    assert "in _call_impl" in plain.stderr
    assert "frames in" not in plain.stderr


def test_alone_all_frames_are_shown_where_they_are_asked_for() -> None:
    done = script(BACKWARD, ACCEL_FULL_TRACEBACK="1")
    assert "step.py" in done.stderr
    assert "frames" not in done.stderr


def test_a_hook_of_the_script_stays() -> None:
    own = "sys.excepthook = lambda kind, error, trace: print('mine:', error)"
    done = script(BACKWARD, before=own)
    assert (done.stdout.startswith("mine: "), done.stderr) == (True, "")


def test_a_debugger_finds_all_frames() -> None:
    look = (
        "import atexit; atexit.register(lambda: traceback.print_tb(sys.last_value.__traceback__))"
    )
    done = script(BACKWARD, before=look)
    assert "step.py" in done.stderr


def test_a_fault_in_the_report_hides_nothing() -> None:
    fault = "from accel_callbacks.errors import rank_report; rank_report.folded_text = None"
    done = script(BACKWARD, before=fault)
    assert "step.py" in done.stderr
    assert "TypeError" not in done.stderr
