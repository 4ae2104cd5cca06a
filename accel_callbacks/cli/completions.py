"""``accel completions``: print what makes a shell complete ``accel`` commands."""

from __future__ import annotations

from argparse import Namespace

from accel_callbacks.cli.parser import CommandParser

SHELLS = ("bash", "zsh", "fish")


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel completions``."""
    parser.add_argument("shell", choices=SHELLS, help="the shell to print completions for")


def run(args: Namespace) -> int:
    """Print the script of one shell."""
    from accel_callbacks.cli.completion_shells import SCRIPTS
    from accel_callbacks.cli.completion_spec import places

    print(SCRIPTS[args.shell](places()), end="")
    return 0
