"""The checks and tests: ``python scripts/test.py``, on Linux, macOS and Windows alike.

The first tier, that the library works, in eight minutes: ``python scripts/test.py``
Everything, as CI does: ``python scripts/test.py --all``
Only pytest, on what you name: ``python scripts/test.py tests/loggers -k csv``
Only .venv: ``python scripts/test.py --set-up``
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

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
_WORKERS = "3"  # many tests wait, for processes and timeouts: three keep two cores busy


def main() -> None:
    words = sys.argv[1:]
    set_up("test", "examples")
    if words == ["--set-up"]:
        return
    # Compiled files are kept: tests start many processes, which would compile all packages anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    everything = "--all" in words
    options = [word for word in words if word in ("--all", "--weigh")]
    if options != words:
        sys.exit(_pytest(*words))
    run = [PYTHON, "-m"]
    step(
        "ruff check", "python -m ruff check --fix repairs most of it", [*run, "ruff", "check", "."]
    )
    step(
        "ruff format --check",
        "run python -m ruff format .",
        [*run, "ruff", "format", "--check", "."],
    )
    with _types(everything):
        _run_pytest(everything, weigh="--weigh" in words)


def _run_pytest(everything: bool, weigh: bool) -> None:
    """Run one tier; fail if a test does."""
    options = ["-q", "-n", _WORKERS, "--dist", "each", "--shares", "--max-worker-restart", "0"]
    options += ["-m", "not slow and not gpu", "--durations", "20"]
    options += [] if everything else ["--first"]
    options += ["--weigh"] if weigh else []
    # Those run with all the packages that they are about, by scripts/test_adapters.
    tests = ["--doctest-modules", "--ignore", "tests/integrations", *_PACKAGES, "tests"]
    begin = time.monotonic()
    say("pytest")
    if _pytest(*options, *tests):
        fail("failed: pytest", "run one test again with: scripts/test PATH::NAME")
    say(f"pytest: done in {time.monotonic() - begin:.0f} s")


def _pytest(*words: str) -> int:
    """Run pytest, which gets the SIGTERM that this process gets; return its exit code."""
    process = subprocess.Popen([str(PYTHON), "-m", "pytest", *words], cwd=ROOT)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


@contextmanager
def _types(everything: bool) -> Iterator[None]:
    """Check the types while the tests run, which leave a core idle now and then."""
    run = [str(PYTHON), "-m", "mypy"]
    packages = [word for name in _PACKAGES for word in ("-p", name)]
    commands = {"mypy --strict": [*run, "--strict", *packages]}
    for system in _OTHER_SYSTEMS if everything else ():
        options = [f"--platform={system}", f"--cache-dir=.mypy_cache/{system}", *_NAMES_ONLY]
        commands[f"mypy for {system}"] = [*run, *options, *packages]
    begin = time.monotonic()
    with TemporaryFile("w+") as printed:
        script = "import subprocess, sys; sys.exit(any(map(subprocess.call, {})))"
        words = [sys.executable, "-c", script.format(list(commands.values()))]
        process = subprocess.Popen(words, cwd=ROOT, stdout=printed, stderr=printed)
        try:
            yield
        finally:  # what it says is worth as much where a test has failed
            code = process.wait()
            printed.seek(0)
            say(f"{', '.join(commands)}\n{printed.read().rstrip()}")
    if code:
        fail(f"failed: {', '.join(commands)}", "the lines above name file and line")
    say(f"{', '.join(commands)}: done in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
