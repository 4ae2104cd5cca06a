"""``accel ckpt``: look at checkpoints, verify them, and remove old ones, from the shell."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from accel_callbacks.cli.options import CommandParser, positive_int

ACTIONS = {
    "list": "what is in a folder of checkpoints: step, size, age, status",
    "latest": "the path of the newest valid checkpoint of a folder",
    "show": "the tensors of a checkpoint, or of a file or folder of model weights",
    "verify": "check every byte of a checkpoint, or of all in a folder",
    "prune": "remove old checkpoints of one run",
}
PLACES = {
    "list": "FOLDER",
    "latest": "FOLDER",
    "show": "PLACE",
    "verify": "PLACE",
    "prune": "FOLDER",
}


def configure(parser: CommandParser) -> None:
    """Add one parser for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action: CommandParser = actions.add_parser(name, help=text, description=text.capitalize())
        place = PLACES[name]
        action.add_argument("place", metavar=place, help="a local path or any fsspec URL")
        action.option(
            "--storage_option",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="an option of the fsspec driver; the value may be JSON; give it several times",
        )
        if name != "prune":
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
    parser.option("--run_id", required=True, metavar="ID", help="whose checkpoints may go")
    parser.option("--keep_last", type=positive_int, metavar="N", help="keep the newest N")
    parser.option("--keep_every", type=positive_int, metavar="N", help="keep every N-th step")
    parser.option("--keep_best", type=positive_int, metavar="N", help="keep the N best")
    parser.option("--metric", metavar="NAME", help="what --keep_best compares; default: the score")
    parser.option("--mode", choices=("min", "max"), default="min", help="which metric is better")
    parser.option("--dry_run", action="store_true", help="only say what would be removed")


_OPTIONS: dict[str, Callable[[CommandParser], None]] = {
    "show": _show_options,
    "verify": _verify_options,
    "prune": _prune_options,
}


def run(args: Namespace) -> int:
    """Do what was asked; 1 if a checkpoint is missing or damaged."""
    from accel_callbacks.cli import ckpt_actions  # imports torch

    return ckpt_actions.run(args)
