"""Launch on a TPU: one process computes on all of its devices, by a function of the script."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType

from accel_callbacks.launch.extension import LaunchExtension
from accel_callbacks.launch.program import Program
from accel_callbacks.launch.settings import LaunchSettings
from accel_callbacks.launch.worker import run_program, stand_in_for_accelerate
from accel_callbacks.plugins.option import SettingsError
from accel_callbacks.terminal_text import printable

__all__ = ["TpuLaunch", "call_main", "launch_on_tpu"]

_DEFAULT = "main"


class TpuLaunch(LaunchExtension):
    """Runs this file for a launch on a TPU."""

    def command(
        self, settings: LaunchSettings, program: Program
    ) -> tuple[tuple[str, ...], Mapping[str, str]] | None:
        """Return the command that calls the function, and its variables; None for other launches.

        Raises:
            SettingsError: the program is not Python.
        """
        if settings.distributed_type != "XLA":
            return None
        if program.kind == "program":
            raise SettingsError(
                "--no_python does not go with a TPU: it calls a function of the script"
            )
        words = ("-m", __name__, settings.main_training_function, program.name)
        variables = {"XLA_DOWNCAST_BF16": "1"} if settings.downcast_bf16 else {}
        return (sys.executable, "-u", *words, *program.arguments), variables


def launch_on_tpu(script: str, arguments: Sequence[str], function: str) -> None:
    """Call the training function of a script in this process, which has all of the TPU's devices.

    Args:
        script: path of the script, or name of a module.
        arguments: ``sys.argv`` of the script, after its name.
        function: name of the training function, which takes no argument or the process index.

    Raises:
        SettingsError: torch_xla is not installed.

    Example:
        >>> from accel_callbacks.launch.tpu import launch_on_tpu
        >>> launch_on_tpu("train.py", [], "main")
        Traceback (most recent call last):
        ...
        accel_callbacks.plugins.option.SettingsError: a launch on a TPU needs torch_xla...
    """
    try:
        import_module("torch_xla")
    except ImportError as error:
        raise SettingsError(
            f"a launch on a TPU needs torch_xla ({error}): pip install 'torch_xla[tpu]', in the "
            "release of the installed torch; without a TPU, leave out --tpu or pass "
            "--distributed_type NO"
        ) from None
    call_main(script, arguments, function)


def call_main(script: str, arguments: Sequence[str], function: str) -> None:
    """Load the script and call its function, or run it as it is if it has no ``main``.

    Where a function is called, the script's ``__main__`` block does not run.

    Raises:
        SettingsError: the script has no such function, and it is not ``main``.

    Example:
        >>> from accel_callbacks.launch.tpu import call_main
        >>> call_main("timeit", [], "default_timer_of_no_module")
        Traceback (most recent call last):
        ...
        accel_callbacks.plugins.option.SettingsError: timeit has no function ...
    """
    stand_in_for_accelerate()
    sys.argv[:] = [script, *arguments]
    if function == _DEFAULT and not _names(script, function):
        run_program("script" if os.path.isfile(script) else "module", script)
        return
    main = getattr(_load(script), function, None)
    if not callable(main):
        raise SettingsError(
            f"{script} has no function {function!r}, which a launch on a TPU calls: leave "
            "--main_training_function out to run the script as it is"
        )
    main(*([0] if inspect.signature(main).parameters else []))


def _names(script: str, function: str) -> bool:
    """Return whether the top level of a script or module names a function."""
    if not os.path.isfile(script):
        return hasattr(import_module(script), function)
    with open(script, "rb") as file:
        return function in compile(file.read(), script, "exec").co_names


def _load(script: str) -> ModuleType:
    """Import the script as ``__mp_main__``, as spawned processes do."""
    if not os.path.isfile(script):
        return import_module(script)
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    module = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__mp_main__")
    loader = SourceFileLoader("__mp_main__", os.path.abspath(script))
    vars(module).update(__file__=loader.path, __loader__=loader)
    loader.exec_module(module)
    return module


def main() -> None:
    """Run the command of a :class:`TpuLaunch`."""
    function, script, *arguments = sys.argv[1:]
    try:
        launch_on_tpu(script, arguments, function)
    except SettingsError as error:
        print(f"accel launch: error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
