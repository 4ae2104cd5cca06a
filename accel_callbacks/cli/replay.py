"""``accel replay``: run a past step of a run again, and say what differs from its journal."""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from accel_callbacks.cli.parser import CommandError, CommandParser, positive_int
from accel_callbacks.terminal_text import printable

if TYPE_CHECKING:
    from accel_callbacks.addons.journal import Journal
    from accel_callbacks.addons.journal.replay import Replay, ReplayRequest


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel replay``."""
    parser.add_argument("run", metavar="RUN", help="the project folder of the run, path or URL")
    parser.option(
        "--step", type=positive_int, required=True, metavar="N", help="the optimizer step"
    )
    parser.option("--run_id", metavar="ID", help="a run of the folder; default: the newest")
    parser.option("--check", action="store_true", help="replay it twice, and compare these too")
    parser.option(
        "--dump",
        metavar="FOLDER",
        help="write activations and gradients of the step there, as safetensors of each rank",
    )
    parser.option("--modules", metavar="GLOB", default="*", help="modules for --dump; default: all")
    parser.option(
        "--break",
        dest="stop",
        action="store_true",
        help="open the debugger in the step, before its backward; for one process",
    )
    parser.option("--command", metavar="TEXT", help="start this, and not what the run was")
    parser.option(
        "--scratch", metavar="FOLDER", help="keep the replay in this folder; default: a new one"
    )


def run(args: Namespace) -> int:
    """Replay the step; return 1 if something differs."""
    from accel_callbacks.addons.journal import Journal, JournalError
    from accel_callbacks.addons.journal.replay import Replay, ReplayRequest

    scratch = Path(args.scratch or tempfile.mkdtemp(prefix="accel-replay-"))
    try:
        if args.scratch is not None and scratch.exists() and any(scratch.iterdir()):
            raise CommandError(f"--scratch {scratch} is not empty: name a new folder")
        replay = Replay(Journal.read(args.run, args.run_id), args.step, args.command)
        if args.stop and replay.attempt.world_size > 1:
            raise CommandError(
                f"--break is for one process, and the run had {replay.attempt.world_size}, which "
                "would wait for each other: use --dump"
            )
        dump = None if args.dump is None else str(Path(args.dump).absolute())
        request = ReplayRequest("", args.step, None, dump, args.modules, args.stop)
        return _run_replay(replay, request, scratch, check=args.check)
    except (JournalError, OSError, ImportError) as error:
        raise CommandError(str(error), exit_code=1) from None
    finally:
        if args.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)


def _run_replay(replay: Replay, request: ReplayRequest, scratch: Path, *, check: bool) -> int:
    from dataclasses import replace

    from accel_callbacks.addons.journal.replay import (
        changes,
        first_difference,
        host_generators_differ,
    )

    place = replay.checkpoint or "the start of the run"
    ranks = replay.attempt.world_size
    print(f"replaying steps {replay.first} to {replay.step} from {place}, ranks: {ranks}")
    now = replay.run(replace(request, folder=str(scratch.absolute() / "first")))
    difference = first_difference(replay.journal, now, replay.first, replay.step)
    if difference is None:
        print(f"all bits are as they were: {_loss(now, replay.step)}")
    else:
        print(difference)
        if host_generators_differ(replay.journal, now, replay.first, replay.step):
            print("the generators of Python or NumPy differ too: seed them, with set_seed(...)")
    news = changes(replay.start, now.attempts[-1].start)
    for line in news:
        print(f"changed since: {printable(line)}")
    if difference is not None and not news:
        print("nothing else that the journal knows of has changed: files that the script reads?")
    _print_switches(now)
    if not check:
        return 0 if difference is None else 1
    again = replay.run(replace(request, folder=str(scratch.absolute() / "second"), dump=None))
    between = first_difference(now, again, replay.first, replay.step)
    if between is None:
        print("a second replay has the same bits on all ranks")
        return 0 if difference is None else 1
    print(f"two replays differ, {between}")
    print(
        "so this is no change of the run: an operation is not deterministic, or rank "
        f"{between.rank} computes wrong; see the switches of torch and the other ranks"
    )
    return 1


def _loss(journal: Journal, step: int) -> str:
    rows = journal.rows()
    return f"loss {rows['loss'][rows['step'] == step][-1]!r} at step {step}"


def _print_switches(journal: Journal) -> None:
    """Print what lets a GPU compute other bits, where there is one."""
    start = journal.attempts[-1].start
    if not str(start.get("device", "")).startswith("cuda"):
        return
    numerics = start.get("numerics") or {}
    wanted = {"deterministic": True, "cudnn_deterministic": True, "cudnn_benchmark": False}
    off = [name for name, value in wanted.items() if numerics.get(name) != value]
    if off:
        print(f"switches of torch that allow other bits on a GPU: {', '.join(off)}")
