"""``accel launch``: start a script on one or more processes, with torch's elastic launcher."""

from __future__ import annotations

import argparse
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from accel_callbacks.cli.launch_plan import LaunchPlan, build_plan
from accel_callbacks.cli.launch_report import exit_code, failure_report, root_cause
from accel_callbacks.cli.options import CommandError, CommandParser, natural_int, positive_int


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel launch``."""
    parser.usage = "accel launch [options] script.py [arguments of the script]"
    _add_processes(parser)
    _add_training(parser)
    _add_running(parser)
    # Not REMAINDER: that would lose a `--` which stands right after the script.
    parser.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="script",
        help="script (module with -m, program with --no_python) and its own arguments",
    )


def _add_processes(parser: CommandParser) -> None:
    """Add how many processes there are, and where."""
    parser.option(
        "--num_processes",
        type=positive_int,
        metavar="N",
        help="processes on all machines together (default: one a GPU, or 1 without a GPU)",
    )
    parser.option("--num_machines", type=positive_int, default=1, metavar="N", help="default: 1")
    parser.option(
        "--machine_rank", type=natural_int, default=0, metavar="N", help="0 on the first machine"
    )
    parser.option("--main_process_ip", metavar="HOST", help="address of the first machine")
    parser.option(
        "--main_process_port",
        type=natural_int,
        metavar="PORT",
        help="default: a free port on one machine, 29500 on several",
    )
    parser.option("--cpu", action="store_true", help="leave GPUs alone")
    parser.option(
        "--num_cpu_threads_per_process",
        type=positive_int,
        metavar="N",
        help="OMP_NUM_THREADS (default: the set one, or cores / processes on this machine)",
    )


def _add_training(parser: CommandParser) -> None:
    """Add what the Accelerator of the script takes where it was given no argument."""
    parser.option("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.option("--gradient_accumulation_steps", type=positive_int, metavar="N")
    parser.option(
        "--debug",
        action="store_true",
        help="compare what the processes hold before each collective, and show who differs",
    )


def _add_running(parser: CommandParser) -> None:
    """Add how the processes are started, watched and logged."""
    parser.option("-m", "--module", action="store_true", help="run a module, like python -m")
    parser.option("--no_python", action="store_true", help="run a program that is not Python")
    parser.option(
        "--max_restarts",
        type=natural_int,
        default=0,
        metavar="N",
        help="start all processes again after a failure, up to N times (default: 0)",
    )
    parser.option("--monitor_interval", type=float, metavar="SECONDS", help="default: 0.1")
    parser.option("--log_dir", metavar="DIR", help="folder of the files of --tee and --redirects")
    parser.option(
        "-t",
        "--tee",
        type=_streams,
        metavar="STREAMS",
        help="screen and file: 1 stdout, 2 stderr, 3 both, or by local rank as in 0:1,1:3",
    )
    parser.option("-r", "--redirects", type=_streams, metavar="STREAMS", help="file only")
    parser.option("--dry_run", action="store_true", help="print the torchrun command and stop")


def _streams(text: str) -> str:
    """Check a --tee or --redirects value."""
    if re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0, 1, 2, 3 or a list such as 0:1,1:3")
    return text


def run(args: Namespace) -> int:
    """Launch, wait, and return the exit code of the first process that failed."""
    plan = build_plan(args, os.environ, _usable_cores(), _count_devices)
    if args.dry_run:
        print(plan.as_shell())
        return 0
    with _environment(plan.env):
        return _launch(plan, args)


def _launch(plan: LaunchPlan, args: Namespace) -> int:
    """Hand the plan to torch's launcher and translate how it ends."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as untyped_run

    elastic_run: Callable[[Namespace], None] = untyped_run
    settings = get_args_parser().parse_args([*plan.torchrun, plan.script])
    # Set after parsing: the script's own `--` and options must not be read as the launcher's.
    settings.training_script_args = plan.escaped_args
    try:
        elastic_run(settings)
    except ChildFailedError as error:
        print(
            failure_report(error.failures, plan.script, args.log_dir), file=sys.stderr, flush=True
        )
        return exit_code(error.failures[root_cause(error.failures)].exitcode)
    except SignalException as stop:
        print(f"accel launch: stopped by {stop.sigval.name}", file=sys.stderr, flush=True)
        return 128 + int(stop.sigval)
    except (RendezvousError, DistError) as error:
        raise _not_met(error) from error
    except RuntimeError as error:
        # torch 2.6 raises a DistNetworkError for a taken port only as its base class.
        if "EADDRINUSE" not in str(error):
            raise
        raise _not_met(error) from error
    return 0


def _not_met(error: Exception) -> CommandError:
    """What to tell when the processes did not find each other."""
    return CommandError(
        f"the processes did not find each other: {error}. Check that every machine was "
        "started with the same --num_machines, --main_process_ip and --main_process_port, "
        "that each has its own --machine_rank, and that the port is free and reachable",
        exit_code=1,
    )


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the children, and put everything back, torch's own writes included."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _count_devices() -> int:
    """Accelerators of this machine, 0 without one."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _usable_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
