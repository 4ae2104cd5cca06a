"""All checks: ``python scripts/test.py``, on Linux, macOS and Windows alike.

Only pytest, on what you name: ``python scripts/test.py tests/loggers -k csv``
Only .venv: ``python scripts/test.py --set-up``
"""

from __future__ import annotations

import subprocess
import sys

from environment import PYTHON, ROOT, set_up, step

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


def main() -> None:
    words = sys.argv[1:]
    set_up("test", "examples")
    if words == ["--set-up"]:
        return
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
    options = ["-q", "-m", "not slow and not gpu", "-n", "3", "--dist", "loadfile"]
    options += ["--durations", "40"]  # all of CI has 15 minutes
    step(
        "pytest",
        "run one test again with: scripts/test PATH::NAME",
        [*run, "pytest", *options, "--doctest-modules", *_PACKAGES, "tests"],
    )


if __name__ == "__main__":
    main()
