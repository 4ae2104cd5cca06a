"""``accel ctl``: tell a run that goes on to save, evaluate, stop or change a setting."""

from __future__ import annotations

import math
import time
from argparse import ArgumentTypeError, Namespace
from typing import TYPE_CHECKING, Any

from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.terminal_text import printable

if TYPE_CHECKING:
    from accel_callbacks.addons.steering.control import LivingRun
    from accel_callbacks.addons.steering.mailbox import Answer

_ACTIONS = ("save", "evaluate", "stop", "set")  # those of journal/mailbox.py, without its imports
_PAUSE = 0.1  # seconds between two looks for the answer
TIMED_OUT = 3


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
    parser.option(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="wait so long for the run to do it, 600 by default",
    )


def run(args: Namespace) -> int:
    """Send the command, and wait for the answer.

    Returns:
        0 if the run has done it, 1 if it refused or does not live, 3 if the time was up.
    """
    from accel_callbacks.addons.journal.format import JournalError
    from accel_callbacks.addons.steering.control import living_run
    from accel_callbacks.addons.steering.mailbox import send

    name, value = _parse_setting(args)
    try:
        target = living_run(args.run, args.run_id)
        sent = send(target.mailbox, target.number, args.action, name, value)
        answer = _wait(target, sent, args.timeout)
    except (JournalError, OSError, ValueError) as error:
        raise CommandError(str(error), exit_code=1) from None
    place = "" if answer.step is None else f" (after step {answer.step})"
    if not answer.accepted:
        raise CommandError(f"the run refused: {answer.text}", exit_code=1)
    print(f"{printable(answer.text)}{place}")
    return 0


def _wait(target: LivingRun, sent: str, timeout: float) -> Answer:
    """Return the answer.

    Raises:
        CommandError: the run has ended or was started again, or the time is up.
    """
    from accel_callbacks.addons.steering.mailbox import read_answer, withdraw

    deadline = time.monotonic() + timeout
    next_look = time.monotonic() + target.patience
    try:
        while (answer := read_answer(target.mailbox, sent)) is None:
            now = time.monotonic()
            if now >= next_look:
                problem = target.problem()
                answer = read_answer(target.mailbox, sent)  # it may have come as the run ended
                if answer is not None:
                    return answer
                if problem is not None:
                    withdraw(target.mailbox, sent)
                    raise CommandError(problem, exit_code=1)
                next_look = time.monotonic() + target.patience
            if now >= deadline:
                raise CommandError(_give_up(target, sent, timeout), exit_code=TIMED_OUT)
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        withdraw(target.mailbox, sent)
        raise
    return answer


def _give_up(target: LivingRun, sent: str, timeout: float) -> str:
    """Withdraw the command, and return what has become of it."""
    from accel_callbacks.addons.steering.mailbox import withdraw

    if withdraw(target.mailbox, sent):
        text = "took no command, and this one is withdrawn: is it in a long step or evaluation?"
    else:
        text = "has the command, and will do it after the step that it is in"
    return f"timed out after {timeout:g} s: the run {text}"


def _parse_setting(args: Namespace) -> tuple[str, Any]:
    """Return the name and the value of ``set``, empty for other actions."""
    if args.action != "set":
        if args.setting is not None:
            raise CommandError(f"{args.action} takes no {args.setting!r}: leave it out")
        return "", None
    name, equals, text = (args.setting or "").partition("=")
    if not name or not equals:
        raise CommandError("set needs NAME=VALUE, such as lr=1e-4")
    return name, _parse_value(text)


def _parse_value(text: str) -> str | int | float | bool:
    """Return the number or truth value that a text is, or the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if not math.isfinite(value):
            raise CommandError(f"{text} is no finite number")
        return value
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise ArgumentTypeError(f"{text!r} is no time: give a number of seconds above 0")
    return seconds
