"""Run the script of a launch as Python would, and report its error with the rank.

Python runs this file by its path, so that nothing of this package is imported before the script.
An error of the script is printed under its rank, and written for the launcher to read.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would take as long as everything here
if TYPE_CHECKING:
    from types import ModuleType, TracebackType
    from typing import Any

__all__ = ["main", "run_program", "stand_in_for_accelerate"]


def main() -> None:
    """Run ``script PATH`` or ``module NAME`` from ``sys.argv``, with the arguments after it.

    Example:
        >>> from accel_callbacks.launch import worker
        >>> callable(worker.main)
        True
    """
    kind, name = sys.argv[1:3]
    del sys.argv[:2]
    _enable_faulthandler()
    first = sys.path.pop(0)  # this file's folder, whose modules have names that others look for too
    try:
        stand_in_for_accelerate()
        sys.path.insert(0, first)
        run_program(kind, name)
    except Exception as error:
        _report(error)
        sys.last_value = _without_frames(error)  # exit hooks read it, as in a script of its own
    else:
        return
    sys.exit(1)  # outside of the except block, so that no frame of the script stays alive


def run_program(kind: str, name: str) -> None:
    """Run a ``"script"`` or ``"module"`` as Python does, as a new ``__main__``.

    ``sys.argv`` has its name and its arguments, and ``sys.path`` the folder of the caller first.
    """
    if kind == "script":
        _run_script(name)
    else:
        _set_first_path(os.getcwd())
        _run_module(name, alter_argv=True)


def stand_in_for_accelerate() -> None:
    """Let ``import accelerate`` get this library, if that is an option of the launch.

    Whatever runs a script of a launch calls this first: without it the script would train on the
    Accelerate that is installed, and nothing would say so.
    """
    if os.environ.get("ACCEL_AS_ACCELERATE") == "1":
        from accel_callbacks.compat import install

        install()


def _set_first_path(place: str) -> None:
    """Replace this file's folder, which Python put first in the path."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        sys.path[0] = place


def _enable_faulthandler() -> None:
    import faulthandler

    try:
        faulthandler.enable()
    except (AttributeError, OSError, RuntimeError, ValueError):
        return  # standard error is closed


def _new_main() -> ModuleType:
    """Make a new ``__main__``, where pickle and multiprocessing look up the script's names."""
    sys.modules["__main__"] = type(sys)("__main__")
    return sys.modules["__main__"]


def _run_script(path: str) -> None:
    from importlib.machinery import SourceFileLoader

    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        place = os.path.abspath(path)
        sys.path[:0] = [place] if getattr(sys.flags, "safe_path", False) else []
        sys.path[0] = place
        _run_module("__main__", alter_argv=False)
        return

    class Script(SourceFileLoader):
        def get_code(self, fullname: str) -> Any:
            """Compile without a bytecode cache, as Python does for a script."""
            return self.source_to_code(self.get_data(self.path), self.path)

    _set_first_path(os.path.dirname(os.path.realpath(path)))
    script = Script("__main__", os.path.abspath(path))
    module = _new_main()
    vars(module).update(__file__=script.path, __loader__=script, __cached__=None)
    script.exec_module(module)


def _run_module(name: str, alter_argv: bool) -> None:
    import runpy

    _new_main()
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls
    run(name, alter_argv)


def _report(error: Exception) -> None:
    """Print an error under its rank, and write it for the launcher."""
    trace = _script_frames(error.__traceback__)
    path = os.path.abspath(__file__)
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(path))))  # scripts change it
    try:
        from accel_callbacks.errors.rank_report import report_error

        report_error(error, trace)
    except Exception:
        sys.__excepthook__(type(error), error, trace)


def _without_frames(error: Exception) -> Exception:
    """Return the error, with neither its own traceback nor those of what led to it."""
    chain: list[BaseException] = [error]
    for link in chain:
        link.__traceback__ = None
        for cause in (link.__cause__, link.__context__):
            if cause is not None and cause not in chain:
                chain.append(cause)
    return error


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the script on."""
    ours = {__file__, "<frozen importlib._bootstrap_external>", "<frozen importlib._bootstrap>"}
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in ours and "runpy" not in os.path.basename(name):
            return trace
        trace = trace.tb_next
    return None


if __name__ == "__main__":
    main()
