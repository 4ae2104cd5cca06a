"""For tests and doctests: tiers, shares of workers, and a session that ends when it is told to."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

ROOT = Path(__file__).parent
#: A function of a test module that uses one of these names starts a process.
_STARTERS = frozenset(
    ("subprocess", "multiprocessing", "warm", "Popen", "fork", "notebook_launcher")
)
_MARKS = ("distributed", "s3")  # tests with one of these start processes, or talk to a server
#: Seconds of each file in each tier, by which `scripts/test` divides the files among its workers.
WEIGHTS = ROOT / "tests" / "weights.json"
_PACKAGES = ("accel_callbacks", "checkpoint_io", "loggers")
_LIGHT = 0.1  # seconds of a file that has no weight

_MARK = "SESSION_OF_TESTS"  # what a session starts has it in its environment

_seen: set[Path] = set()
_known_starters: dict[Path, set[str]] = {}
os.environ.setdefault(_MARK, os.urandom(8).hex())
_at_sigterm: signal._HANDLER = signal.SIG_DFL

# Threads of torch wait for each other without spinning: beside other work on the same cores, a spin
# of milliseconds in each operation makes a test of two seconds one of two minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What `nohup`, cron or a script's `&` starts inherits Ctrl-C as ignored, and so does all that it
# starts in turn. Tests send it: to this process, to workers of xdist, and to their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The journal of each run asks git for what differs from the commit, which takes a second here, and
# thousands of tests begin a run. The tests of trackers, without torch, let their tools see git.
if importlib.util.find_spec("torch") is not None:
    os.environ.setdefault("GIT_DIR", os.devnull)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the tier, and what `scripts/test` gives along."""
    parser.addoption(
        "--first",
        action="store_true",
        help="the first tier: tests that start no process, and those marked `first`",
    )
    parser.addoption(
        "--shares",
        action="store_true",
        help="with -n N --dist each: each worker collects and runs its own share of the files",
    )
    parser.addoption(
        "--weigh", action="store_true", help="record how long the files take, for --shares"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGTERM end the session, and weigh the files where it is asked for."""
    global _at_sigterm
    if not hasattr(config, "workerinput"):
        _at_sigterm = _end_session
    signal.signal(signal.SIGTERM, _at_sigterm)
    if config.getoption("--weigh") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Scales(config), "scales")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of the second tier, and those that another worker takes."""
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    if config.getoption("--first") and not _in_first_tier(collection_path):
        return True
    worker = getattr(config, "workerinput", None)
    if not config.getoption("--shares") or worker is None:
        return None
    share = _shares(config.getoption("--first"), worker["workercount"])
    owner = share.get(collection_path.relative_to(ROOT).as_posix(), 0)
    return True if owner != int(worker["workerid"].removeprefix("gw")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the first tier, leave out tests that start processes and are not marked `first`."""
    if not config.getoption("--first"):
        return
    kept, left = [], []
    for item in items:
        second = _starts(item) and not item.get_closest_marker("first")
        (left if second else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _in_first_tier(path: Path) -> bool:
    """Return whether a file may have a test of the first tier, without importing it."""
    text = path.read_text("utf-8")
    marks = re.search(r"^pytestmark = .*?(?=^\S|\Z)", text, re.M | re.S)
    named = marks is not None and any(f"mark.{mark}" in marks[0] for mark in _MARKS)
    return not named or "mark.first" in text


def _starts(item: pytest.Item) -> bool:
    """Return whether a test starts a process, by what its function and fixtures use."""
    if isinstance(item, pytest.DoctestItem):
        return False
    if any(item.get_closest_marker(mark) for mark in _MARKS):
        return True
    return getattr(item, "originalname", item.name) in _starters(item.path)


def _starters(path: Path) -> set[str]:
    """Return the names in a module of tests with which a process is started."""
    if path in _known_starters:
        return _known_starters[path]
    tree = ast.parse(path.read_text("utf-8"))
    known = _known_starters[path] = set(_STARTERS)  # that far for modules that import each other
    fixtures: set[str] = set()
    for folder in path.relative_to(ROOT).parents:
        conftest = ROOT / folder / "conftest.py"
        if conftest.exists() and conftest != path and folder != Path():
            fixtures |= _starters(conftest)
    uses: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            module = ROOT / f"{node.module.replace('.', '/')}.py"
            inner = _starters(module) if module.exists() else set(_STARTERS)
            known |= {alias.asname or alias.name for alias in node.names if alias.name in inner}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            uses[node.name] = {*_names_in(node)}
            if fixtures & {arg.arg for arg in ast.walk(node) if isinstance(arg, ast.arg)}:
                known.add(node.name)
    while grown := {name for name, used in uses.items() if name not in known and used & known}:
        known |= grown
    return known


def _names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the variables, arguments, attributes and named fixtures of a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@lru_cache(None)
def _shares(first: bool, workers: int) -> dict[str, int]:
    """Return the worker of each file: the heaviest first, each to whom has the least so far."""
    weights: dict[str, dict[str, float]] = json.loads(WEIGHTS.read_text("utf-8"))
    tier = "first" if first else "all"
    files = [*(ROOT / "tests").rglob("test_*.py")]
    files += [path for package in _PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in files)
    cost = {name: weights.get(name, {}).get(tier, _LIGHT) for name in names}
    load = [0.0] * workers
    owner: dict[str, int] = {}
    for name in sorted(names, key=lambda name: -cost[name]):
        owner[name] = load.index(min(load))
        load[owner[name]] += cost[name]
    return owner


class _Scales:
    """Adds up how long each file takes, and writes it down at the end.

    Args:
        config: of the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._tier = "first" if config.getoption("--first") else "all"
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        weights: dict[str, dict[str, float]] = json.loads(WEIGHTS.read_text("utf-8"))
        weights = {name: row for name, row in weights.items() if (ROOT / name).exists()}
        for name, seconds in self._seconds.items():
            row = weights.setdefault(name, {})
            row.pop(self._tier, None)
            if seconds >= 2 * _LIGHT:
                row[self._tier] = round(seconds, 1)
        lines = [
            f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(weights.items()) if row
        ]
        WEIGHTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before each file: what is there now is gone through no more.

    The library collects garbage at the end of a training, and thousands of tests make that slow.
    """
    if item.path not in _seen:
        _seen.add(item.path)
        gc.collect()
        gc.freeze()
    if isinstance(item, pytest.DoctestItem):
        _leave_the_group()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until its end


def _leave_the_group() -> None:
    """Each example begins as a program does, whatever the one before has made."""
    state = sys.modules.get("accel_callbacks.distributed.topology")
    if state is not None:
        state.destroy_topology()


def pytest_runtest_logfinish() -> None:
    """After each test, SIGTERM ends this session again, whatever a test has left there."""
    if signal.getsignal(signal.SIGTERM) is not _at_sigterm:
        signal.signal(signal.SIGTERM, _at_sigterm)


def pytest_keyboard_interrupt() -> None:
    """Let nothing that the session has started hold up its end."""
    _kill_children()


def _end_session(number: int, frame: FrameType | None) -> NoReturn:
    print(f"\nthe tests end at {signal.Signals(number).name}", file=sys.stderr, flush=True)
    _kill_children()
    os._exit(128 + number)


def _kill_children() -> None:
    """Kill what this session has started: its descendants, and those that left them."""
    import psutil

    started = {*psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == os.environ[_MARK]:
                started.add(process)
    for process in started - {psutil.Process()}:
        with contextlib.suppress(psutil.Error):
            process.kill()
