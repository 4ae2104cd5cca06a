"""``accel ckpt``: list, inspect, verify and remove checkpoints."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from accel_callbacks.cli.parser import CommandParser, positive_int

ACTIONS = {
    "ls": "list the checkpoints of a folder: step, run, score, size, age, status",
    "latest": "print the path of the newest valid checkpoint of a folder",
    "show": "list the tensors of a checkpoint, of the newest in a folder, or of model weights",
    "verify": "verify every byte of a checkpoint, or of all in a folder",
    "prune": "remove old checkpoints of one run",
    "rm": "remove checkpoints, after asking",
}
ALIASES = {"ls": ("list",)}
PLACES = {
    "ls": "FOLDER",
    "latest": "FOLDER",
    "show": "PLACE",
    "verify": "PLACE",
    "prune": "FOLDER",
}
_JSON = ("ls", "latest", "show", "verify")


def configure(parser: CommandParser) -> None:
    """Add a subparser for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action: CommandParser = actions.add_parser(
            name, help=text, description=text.capitalize(), aliases=ALIASES.get(name, ())
        )
        action.set_defaults(action=name)
        if name in PLACES:
            place = PLACES[name]
            action.add_argument("place", metavar=place, help="a local path or any fsspec URL")
        action.option(
            "--storage_option",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="an option of the fsspec driver; the value may be JSON; give it several times",
        )
        if name in _JSON:
            action.option("--json", action="store_true", help="print JSON")
        if (add := _OPTIONS.get(name)) is not None:
            add(action)
        parser.adopt(action)


def _show_options(parser: CommandParser) -> None:
    """Options of ``accel ckpt show``."""
    parser.option("--pattern", metavar="GLOB", help="only tensors whose names match, such as '*.w'")


def _verify_options(parser: CommandParser) -> None:
    """Options of ``accel ckpt verify``."""
    parser.option(
        "--sizes_only", action="store_true", help="only sizes and headers, without reading it all"
    )


def _prune_options(parser: CommandParser) -> None:
    """Options of ``accel ckpt prune``."""
    whose = parser.add_mutually_exclusive_group()
    parser.option(
        "--run", group=whose, metavar="NAME", help="run whose checkpoints may be removed, by name"
    )
    parser.option("--run_id", group=whose, metavar="ID", help="the same by its id, as ls shows it")
    parser.option(
        "--all_runs",
        group=whose,
        action="store_true",
        help="every run of the folder, each by itself; without any of the three: its only run",
    )
    parser.option("--keep_last", type=positive_int, metavar="N", help="keep the newest N")
    parser.option("--keep_every", type=positive_int, metavar="N", help="keep every N-th step")
    parser.option("--keep_best", type=positive_int, metavar="N", help="keep the N best")
    parser.option(
        "--metric",
        metavar="NAME",
        help="what --keep_best compares: a key of the metadata; default: the score",
    )
    parser.option("--mode", choices=("min", "max"), default="min", help="which metric is better")
    parser.option("--dry_run", action="store_true", help="only print what would be removed")
    _force_option(parser)


def _rm_options(parser: CommandParser) -> None:
    """Options of ``accel ckpt rm``."""
    parser.add_argument(
        "places", metavar="CHECKPOINT", nargs="+", help="a local path or any fsspec URL"
    )
    parser.option("--yes", action="store_true", help="do not ask, as where nobody can answer")
    parser.option(
        "--unfinished",
        action="store_true",
        help="also the remains of a killed save, and checkpoints with a corrupt manifest",
    )
    _force_option(parser)


def _force_option(parser: CommandParser) -> None:
    """Add the option of actions that change a folder."""
    parser.option("--force", action="store_true", help="also in a folder that a running run holds")


_OPTIONS: dict[str, Callable[[CommandParser], None]] = {
    "show": _show_options,
    "verify": _verify_options,
    "prune": _prune_options,
    "rm": _rm_options,
}


def run(args: Namespace) -> int:
    """Run the action; return 1 if a checkpoint is missing or damaged."""
    from accel_callbacks.cli import ckpt_actions  # imports torch

    return ckpt_actions.run(args)
