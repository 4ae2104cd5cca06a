"""Loggers that know of the other processes, on one; and the progress bar."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from accel_callbacks import Accelerator, MultiProcessAdapter, get_logger, tqdm
from accel_callbacks.logging import notice
from tests.support import warm


@pytest.fixture
def name(request: pytest.FixtureRequest):
    """A logger of this test's own."""
    name = f"tests.{request.node.name}"
    yield name
    logging.getLogger(name).setLevel(logging.NOTSET)


def test_a_record_points_at_the_line_that_logs(name, caplog):
    logger = get_logger(name, "DEBUG")
    assert isinstance(logger, MultiProcessAdapter)

    def helper():
        logger.info("a", stacklevel=2)

    logger.info("b")
    logger.log(logging.INFO, "c")
    logger.warning("d", in_order=True)
    logger.warning_once("e")
    logger.warning_once("f", in_order=True)
    helper()
    lines = {record.message: record.lineno for record in caplog.records}
    first = lines["b"]
    assert lines == {m: first + n for n, m in enumerate(["b", "c", "d", "e", "f", "a"])}
    assert {record.filename for record in caplog.records} == {"test_logging.py"}


def test_arguments_extra_and_exceptions_reach_the_record(name, caplog):
    logger = MultiProcessAdapter(logging.getLogger(name), {"run": "a", "step": 1})
    try:
        raise ValueError
    except ValueError:
        logger.exception("%s of %d", "one", 2, extra={"step": 5})
    (record,) = caplog.records
    assert (record.message, record.run, record.step) == ("one of 2", "a", 5)
    assert record.exc_info[0] is ValueError


def test_a_warning_is_written_once_for_its_message_and_arguments(name, caplog):
    logger = get_logger(name)
    for value in (1, 2, 1):
        logger.warning_once("slow: %s", value)
        logger.warning_once("unhashable: %s", [value], in_order=True)
    assert [record.message for record in caplog.records] == [
        "slow: 1",
        "unhashable: [1]",
        "slow: 2",
        "unhashable: [2]",
    ]
    get_logger(name).warning_once("slow: %s", 1)  # another adapter knows nothing of it
    assert len(caplog.records) == 5


def test_the_level_is_that_of_this_logger_only(name, monkeypatch):
    root = logging.getLogger().level
    assert get_logger(name, "debug").logger.level == logging.DEBUG
    assert get_logger(name).logger.level == logging.DEBUG  # as it was
    assert get_logger(name, logging.ERROR).logger.level == logging.ERROR
    monkeypatch.setenv("ACCEL_LOG_LEVEL", "info")
    assert get_logger(name).logger.level == logging.INFO
    assert get_logger(name, "WARNING").logger.level == logging.WARNING
    assert logging.getLogger().level == root


def test_what_is_below_the_level_is_not_written(name, caplog):
    logger = get_logger(name, "WARNING")
    logger.info("no")
    logger.info("no", in_order=True)
    logger.warning("yes")
    assert caplog.messages == ["yes"]


def test_a_level_that_does_not_exist_is_an_error_with_a_suggestion(name, monkeypatch):
    with pytest.raises(ValueError, match=r"log_level='wanring'.*Did you mean 'WARNING'"):
        get_logger(name, "wanring")
    monkeypatch.setenv("ACCEL_LOG_LEVEL", "INF")
    with pytest.raises(ValueError, match=r"ACCEL_LOG_LEVEL='INF'.*Did you mean 'INFO'"):
        get_logger(name)


@pytest.mark.parametrize(
    ("rank", "options", "written"),
    [
        (0, "", "said"),
        (1, "", ""),
        (1, "main_process_only=False", "[RANK 1] said"),
        (1, "in_order=True", "[RANK 1] said"),
        (1, "in_order=True, main_process_only=True", ""),
    ],
)
def test_it_works_before_any_accelerator_exists(rank, options, written):
    code = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "from accel_callbacks import get_logger\n"
        f"get_logger('early').warning('said', {options})"
    )
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "PATH": ""}
    done = warm.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == written


def test_an_accelerator_changes_nothing_for_one_process(name, caplog):
    Accelerator(cpu=True)
    get_logger(name).warning("said", in_order=True)
    assert caplog.messages == ["said"]


def test_the_bar_is_tqdms_own():
    shown = io.StringIO()
    assert list(tqdm(range(3), desc="reading", file=shown)) == [0, 1, 2]
    assert "reading" in shown.getvalue()
    hidden = io.StringIO()
    assert list(tqdm(range(3), file=hidden, disable=True)) == [0, 1, 2]
    assert hidden.getvalue() == ""


def test_the_flag_in_the_place_of_the_iterable_is_an_error():
    with pytest.raises(TypeError, match="main_process_only=True"):
        tqdm(True, range(3))


def test_a_missing_tqdm_is_an_error_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        tqdm(range(3))


def test_a_notice_wraps_at_words_on_a_terminal_only(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = "resumed from /a/path/that/is/longer/than/the/terminal/itself (step 4, epoch 1)"
    monkeypatch.setenv("COLUMNS", "40")
    for stream, lines in (
        (io.StringIO(), [f"[accel] {text}"]),
        (Screen(), ["[accel] resumed from", f"  {text.split()[2]}", "  (step 4, epoch 1)"]),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        notice(text)
        assert stream.getvalue().splitlines() == lines
