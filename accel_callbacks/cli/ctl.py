"""``accel ctl``: make a running job save, evaluate, stop or change a setting."""

from __future__ import annotations

from argparse import Namespace

from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.terminal_text import printable

_ACTIONS = ("save", "evaluate", "stop", "set")


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel ctl``."""
    parser.add_argument(
        "run", metavar="RUN", help="a run's project folder, or its folder in `journal`"
    )
    parser.add_argument(
        "action", metavar="ACTION", choices=_ACTIONS, help=f"what to do: {', '.join(_ACTIONS)}"
    )
    parser.add_argument(
        "setting", metavar="NAME=VALUE", nargs="?", help="of `set`, such as lr=1e-4 or log_every=10"
    )
    parser.option("--run_id", metavar="ID", help="a run of the folder; default: the one that lives")


def run(args: Namespace) -> int:
    """Send the command; return 0. The log of the run says what it has done.

    Raises:
        CommandError: no run takes it, or the command is wrong.
    """
    from accel_callbacks.addons.journal.format import JournalError
    from accel_callbacks.addons.steering.commands import send_command

    setting = args.setting or ""
    if args.action == "set" and not all(setting.partition("=")[:2]):
        raise CommandError("set needs NAME=VALUE, such as lr=1e-4")
    if args.action != "set" and setting:
        raise CommandError(f"{args.action} takes no {setting!r}: leave it out")
    command = f"{args.action} {setting}".strip()
    try:
        run_id = send_command(args.run, command, args.run_id)
    except (JournalError, OSError) as error:
        raise CommandError(str(error), exit_code=1) from None
    print(printable(f"sent to run {run_id}: {command}; its log says what it does"))
    return 0
