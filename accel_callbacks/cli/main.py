"""Entry point of ``accel``: find and run the subcommand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from accel_callbacks import __version__
from accel_callbacks.cli.parser import CommandError, CommandParser, suggestion
from accel_callbacks.cli.registry import COMMANDS

__all__ = ["main"]

CLOSED = 128 + 13  # exit code that a shell reports for SIGPIPE


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """Exit silently if the reader of standard output closes it.

    Raises:
        CommandError: the encoding of standard output cannot represent the text.
    """
    try:
        try:
            yield
        finally:  # --help ends by SystemExit
            if sys.stdout is not None:  # None if the descriptor is closed from the start
                sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes again at exit, which must not fail.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
        raise SystemExit(CLOSED) from None
    except UnicodeEncodeError as error:
        text = f"standard output is {error.encoding}, which cannot hold all of this"
        raise CommandError(f"{text}: set PYTHONIOENCODING=utf-8", 1) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``accel`` command and return its exit code.

    Args:
        argv: arguments after ``accel``; by default ``sys.argv[1:]``.

    Returns:
        0 on success, 2 for a wrong command line, otherwise the code of the subcommand (for
        ``accel launch``: that of the failed process, or 128 + n for signal n). A wrong command
        line raises nothing: the message goes to standard error.

    Example:
        >>> from accel_callbacks.cli.main import main
        >>> words = ["--num_processes", "2", "--num_cpu_threads_per_process", "1"]
        >>> main(["launch", "--dry_run", *words, "-m", "timeit", "pass"])
        export OMP_NUM_THREADS=1
        ...
        torchrun --nnodes 1 --nproc-per-node 2 ... --module timeit pass
        # rank 0: RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 ...
        # rank 1: RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 ...
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with pipe_may_close():
            if not words or words[0].startswith("-"):
                return _top_level(words)
            return _subcommand(words[0], words[1:], whole_process=argv is None)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except CommandError as error:
        from accel_callbacks.terminal_text import printable, wrapped  # only a failure needs them

        text = "\n".join(map(printable, str(error).split("\n")))
        print(wrapped(f"accel {words[0]}: error: {text}", sys.stderr), file=sys.stderr)
        return error.exit_code


def _top_level(words: Sequence[str]) -> int:
    """Handle ``accel``, ``accel --help`` and ``accel --version``."""
    parser = CommandParser(
        prog="accel",
        usage="accel [-h] [--version] COMMAND ...",
        description="Tools around plain PyTorch training loops.",
    )
    parser.option("--version", action="version", version=f"accel-callbacks {__version__}")
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rest = "accel COMMAND --help shows its options, in which - may stand for _."
    parser.epilog = "\n".join(["commands:", *lines, "", rest])
    parser.parse(words)
    parser.print_help(sys.stderr)
    return 2


def _subcommand(name: str, words: Sequence[str], whole_process: bool) -> int:
    """Import the module of a subcommand, parse its arguments and run it."""
    if gone := _advice_on_removed(name, words):
        raise CommandError(gone)
    command = COMMANDS.get(name)
    if command is None:
        hint = suggestion(name, COMMANDS)
        print(
            f"accel: error: unknown command {name!r}{hint}; commands: {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    module = command.load()
    parser = CommandParser(prog=f"accel {name}", description=f"{command.help.capitalize()}.")
    module.configure(parser)
    args = parser.parse(words)
    # For the launcher: srun repeats the words, and a single script may replace this process.
    args.words, args.whole_process = list(words), whole_process
    return module.run(args)


def _advice_on_removed(name: str, words: Sequence[str]) -> str:
    """Return what serves instead of a command or action of earlier versions; empty for others."""
    from accel_callbacks.errors.removed import REMOVED

    gone = (command for command in (f"accel {name}", f"accel {name} {''.join(words[:1])}"))
    return next((f"no such command. {REMOVED[one]}" for one in gone if one in REMOVED), "")
