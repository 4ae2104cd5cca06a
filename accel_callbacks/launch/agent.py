"""Run a plan with torch's elastic launcher and report how its processes ended."""

from __future__ import annotations

import gc
import logging
import os
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from accel_callbacks.launch import worker
from accel_callbacks.launch.environment import changed_environment
from accel_callbacks.launch.extension import extensions
from accel_callbacks.launch.ignored_signals import keep_ignored_signals
from accel_callbacks.launch.plan import AgentPlan, escaped
from accel_callbacks.launch.report import code_of, exit_code, failure_report, root_cause
from accel_callbacks.plugins.option import SettingsError

_REPORTED_HERE = ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent")


class LaunchError(RuntimeError):
    """Raised if the processes do not find each other; the text is one line with a remedy."""


def run_agent(plan: AgentPlan) -> int:
    """Run the plan with torch's launcher and return the exit code.

    Raises:
        LaunchError: the processes did not find each other.
        SettingsError: the log folder cannot be made, torch is missing, or its launcher refuses
            the options.
    """
    _make_log_folder(plan.log_dir)
    _import_torch()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    settings = _settings(plan)
    for name in _REPORTED_HERE:
        # They log every failure before our report, which names the rank that failed first.
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        _run_elastic(settings, plan)
    except ChildFailedError as error:
        failures: Any = error.failures
        if not plan.quiet:
            text = failure_report(failures, plan.program.name, plan.log_dir)
            print(text, file=sys.stderr, flush=True)
        return exit_code(code_of(failures[root_cause(failures)]))
    except SignalException as stop:
        print(f"accel launch: stopped by {stop.sigval.name}", file=sys.stderr, flush=True)
        return 128 + int(stop.sigval)
    except (RendezvousError, DistError) as error:
        raise _rendezvous_failed(error) from error
    except RuntimeError as error:
        # torch 2.6 raises a DistNetworkError for a taken port only as its base class.
        if "EADDRINUSE" not in str(error):
            raise
        raise _rendezvous_failed(error) from error
    except (ValueError, AssertionError) as error:
        raise SettingsError(f"torch's launcher refuses this: {_first_line(error)}") from error
    return 0


def _run_elastic(settings: Namespace, plan: AgentPlan) -> None:
    """Run torch's launcher as ``torchrun`` does, with our agent, stores and starts of workers."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
    from torch.distributed.launcher import api as launcher
    from torch.distributed.run import config_from_args as untyped_config

    from accel_callbacks.launch.attempts import Attempts, RestartingAgent
    from accel_callbacks.launch.followers import Workers
    from accel_callbacks.launch.rendezvous_handler import listen_at_one_address

    if settings.standalone:
        settings.rdzv_backend, settings.rdzv_endpoint = "c10d", "127.0.0.1:0"
        settings.rdzv_id = str(uuid.uuid4())
    elif plan.rendezvous.any_port and sys.platform != "win32":
        # The one that was free when it was chosen may be taken by now.
        settings.master_port = 0
    config_from_args: Callable[[Namespace], tuple[Any, Any, list[str]]] = untyped_config
    config, command, arguments = config_from_args(settings)
    # Before the launch: the handler of the rendezvous is made from the name in the config.
    listen_at_one_address(config)
    with ExitStack() as stack:
        restarts = int(config.max_restarts)
        parts = [kind() for kind in extensions()]
        variables: dict[str, str] = {}
        for part in parts:
            variables |= part.start_workers(stack, restarts)
        # The processes inherit it, and torch adds its own to it, which is undone too.
        stack.enter_context(changed_environment(variables))
        attempts = Attempts(restarts, plan.max_preemptions, plan.quiet, parts)
        workers = Workers(get_subprocess_handler)
        stack.enter_context(_replace_part(api, "get_subprocess_handler", workers.start))
        agent = partial(RestartingAgent, attempts)
        stack.enter_context(_replace_part(launcher, "LocalElasticAgent", agent))
        stack.enter_context(keep_ignored_signals())
        try:
            launcher.elastic_launch(config, command)(*arguments)
        finally:
            # Before the stack closes: parts of the launch remove what the processes may still use.
            workers.close()
            attempts.close("stopped")


@contextmanager
def _replace_part(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a part of torch's launcher, which has no option for it, during the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _import_torch() -> None:
    """Import torch's launcher with the garbage collector off: everything it allocates stays."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        import torch.distributed.run  # noqa: F401
    except ImportError as error:
        raise SettingsError(f"{error}: pip install torch, which starts several processes") from None
    finally:
        if collecting:
            gc.enable()


def _settings(plan: AgentPlan) -> Namespace:
    """Return the plan as the parsed arguments of torch's launcher."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    known: Any = parser._option_string_actions
    for word in plan.torchrun:
        if word.startswith("--") and word not in known:
            import torch

            raise SettingsError(f"{word} needs a newer torch than {torch.__version__}")
    settings: Namespace = parser.parse_args([*plan.torchrun, plan.program.name])
    # Set after parsing: the script's own `--` and options must not be read as the launcher's.
    words = list(plan.program.arguments)
    settings.no_python = plan.program.kind == "program"
    if not settings.no_python:
        settings.training_script = worker.__file__
        words = [plan.program.kind, plan.program.name, *words]
    settings.training_script_args = escaped(words)
    return settings


def _make_log_folder(folder: str | None) -> None:
    try:
        os.makedirs(folder or ".", exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--log_dir {folder}: {error.strerror}; name another folder") from None


def _rendezvous_failed(error: Exception) -> LaunchError:
    return LaunchError(
        f"the processes did not find each other: {_first_line(error)}. Check that every machine "
        "was started with the same --num_machines, --main_process_ip and --main_process_port, "
        "that each has its own --machine_rank, and that the port is free and reachable"
    )


def _first_line(error: Exception) -> str:
    """Return the message without the C++ frames that torch appends to it."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
