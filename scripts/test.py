"""All checks: ``python scripts/test.py``, on Linux, macOS and Windows alike.

Only pytest, on what you name: ``python scripts/test.py tests/loggers -k csv``
Only what starts no process, in about two minutes: ``python scripts/test.py --fast``
Only .venv: ``python scripts/test.py --set-up``
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from environment import PYTHON, ROOT, fail, say, set_up, step

_PACKAGES = ("accel_callbacks", "loggers", "checkpoint_io")
# For other systems only the names of the standard library are looked at: typeshed knows which of
# them each system has. Without torch that takes a tenth of the time; what follows is left out.
_OTHER_SYSTEMS = ("darwin", "win32")
_NAMES_ONLY = (
    *("--follow-imports=skip", "--allow-subclassing-any", "--allow-untyped-decorators"),
    *("--no-warn-return-any", "--no-warn-unused-ignores", "--no-warn-redundant-casts"),
    *(
        f"--disable-error-code={code}"
        for code in ("arg-type", "index", "misc", "operator", "valid-type", "var-annotated")
    ),
)
_MARKERS = "not slow and not gpu"
_TESTS_FAILED = 1  # pytest's exit code, where nothing else is wrong
_FAILED_AGAIN = 2  # that many failures may be the machine's; more are the change's


def main() -> None:
    words = sys.argv[1:]
    set_up("test", "examples")
    if words == ["--set-up"]:
        return
    if words == ["--fast"]:
        words += ["-q", "-n", "2", "--dist", "loadfile", "-m", _MARKERS, "tests"]
    if words:
        sys.exit(subprocess.call([str(PYTHON), "-m", "pytest", *words], cwd=ROOT))
    run = [PYTHON, "-m"]
    step(
        "ruff check", "python -m ruff check --fix repairs most of it", [*run, "ruff", "check", "."]
    )
    step(
        "ruff format --check",
        "run python -m ruff format .",
        [*run, "ruff", "format", "--check", "."],
    )
    packages = [word for name in _PACKAGES for word in ("-p", name)]
    advice = "the lines above name file and line"
    step("mypy --strict", advice, [*run, "mypy", "--strict", *packages])
    for system in _OTHER_SYSTEMS:
        options = [f"--platform={system}", f"--cache-dir=.mypy_cache/{system}", *_NAMES_ONLY]
        step(f"mypy for {system}", advice, [*run, "mypy", *options, *packages])
    # Tests start many processes, some in an environment that forbids them to keep compiled files.
    step(
        "compile the packages",
        "the lines above name file and line",
        [*run, "compileall", "-q", *_PACKAGES],
    )
    # Many tests wait, for processes and timeouts: three workers keep two cores busy.
    options = ["-q", "-m", _MARKERS, "-n", "3", "--dist", "loadfile"]
    options += ["--durations", "40"]  # all of CI has 15 minutes
    options += ["--cache-clear"]  # of failures before this run
    # Those run with all the packages that they are about, by scripts/test_adapters.
    elsewhere = ["--ignore", "tests/integrations"]
    tests = ["--doctest-modules", *elsewhere, *_PACKAGES, "tests"]
    begin = time.monotonic()
    say("pytest")
    code = subprocess.call([str(word) for word in (*run, "pytest", *options, *tests)], cwd=ROOT)
    if code == _TESTS_FAILED:
        code = _run_failed_again(run, tests)
    if code:
        fail("failed: pytest", "run one test again with: scripts/test PATH::NAME")
    say(f"pytest: done in {time.monotonic() - begin:.0f} s")


def _run_failed_again(run: list[str | Path], tests: list[str]) -> int:
    """Run a few failed tests alone, on a machine that is busy with nothing else; say which.

    What fails twice fails; a machine that stalls for a minute costs one test, not the whole run.
    """
    recorded = json.loads((ROOT / ".pytest_cache/v/cache/lastfailed").read_text("utf-8"))
    if len(recorded) > _FAILED_AGAIN:
        return _TESTS_FAILED
    names = "\n".join(f"  {name}" for name in recorded)
    say(f"FAILED the first time, and run again alone, which is to be looked into:\n{names}")
    words = [*run, "pytest", "-q", "-m", _MARKERS, "--last-failed", *tests]
    return subprocess.call([str(word) for word in words], cwd=ROOT)


if __name__ == "__main__":
    main()
