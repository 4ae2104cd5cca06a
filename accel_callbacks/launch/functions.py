"""Run a function on several processes; return its results, or raise the error of the first."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import string
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from accel_callbacks.distributed.tcp_store import TCPStore, serve_store
from accel_callbacks.distributed.topology import destroy_topology
from accel_callbacks.errors import RemoteError
from accel_callbacks.errors.text import published_text
from accel_callbacks.launch.environment import (
    changed_environment,
    loopback_variables,
    rank_variables,
)
from accel_callbacks.launch.interface import gloo_variables
from accel_callbacks.launch.launch_folder import launch_folder
from checkpoint_io.local_files import replace

__all__ = ["FunctionLaunch", "LabeledStream", "quiet_forks", "run_function"]

_HERE = Path(__file__).parent
_GRACE = 5.0  # seconds in which a process may save after SIGTERM
_INTERRUPTED = 128 + signal.SIGINT
_PLAIN = ("cpu", "meta")
_AFTERMATH = (-signal.SIGTERM, -signal.SIGABRT)  # the failure of another rank can lead to these


# --- in the launching process -----------------------------------------------------------------


@dataclass(frozen=True)
class FunctionLaunch:
    """Number of processes, where they meet, and what each of them gets.

    Args:
        launcher: name of the launching function, for errors.
        processes: on this machine.
        start_method: ``"fork"`` or ``"spawn"``.
        machines: that take part, each with as many processes.
        node_rank: of this machine.
        host: where the processes meet: the first machine.
        port: where they meet; 0 for a free one, on one machine.
        environment: variables of the processes.
        max_restarts: how often all processes are restarted after a failure.
        prefix: template of the label of each line that a process writes.
    """

    launcher: str
    processes: int
    start_method: str = "fork"
    machines: int = 1
    node_rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    prefix: str = ""


def run_function(
    launch: FunctionLaunch, function: Callable[..., Any], args: Sequence[Any]
) -> list[Any]:
    """Call a function on new processes; return the results of this machine, by rank.

    Raises:
        RemoteError: a process failed; the text contains its traceback.
        RuntimeError: the port is taken.
        KeyboardInterrupt: Ctrl-C was pressed; the processes have ended.
    """
    for attempt in range(launch.max_restarts + 1):
        with launch_folder(Path(tempfile.gettempdir())) as folder:
            codes = _run_attempt(launch, attempt, folder, function, args)
            results = [folder / f"{local}.result" for local in range(launch.processes)]
            # torch's wrapper of the function takes an interrupt for a success.
            if all(result.exists() for result in results):
                return [pickle.loads(result.read_bytes()) for result in results]
            error = _first_error(launch, folder, codes)
        if attempt < launch.max_restarts:
            print(f"{error}\n[accel] restart {attempt + 1}", file=sys.stderr, flush=True)
    raise error


def _run_attempt(
    launch: FunctionLaunch,
    attempt: int,
    folder: Path,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> list[int | None]:
    """Start the processes and wait; return the exit codes at the end or at the first failure.

    The processes have ended on return, whatever it is.
    """
    # Otherwise each fork would inherit, and write, what is still in the buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    store = _serve_store(launch)
    # The store lives here, so that no rank serves one at a port that another process could take
    # meanwhile. torch's own variable says so to the ranks.
    variables = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} if store else {}
    port = store.port if store else launch.port
    process = _Process(launch, folder, port)
    others = set(active_children())
    try:
        with changed_environment(_variables(launch) | variables), quiet_forks():
            processes = start_processes(  # type: ignore[no-untyped-call]
                process, (function, args), launch.processes, False, False, launch.start_method
            ).processes
    except BaseException:
        # Those that have started would wait for the others until their timeout.
        _end([child for child in active_children() if child not in others])
        raise
    try:
        running = list(range(launch.processes))
        while running:
            wait([processes[local].sentinel for local in running])
            ended = [local for local in running if processes[local].exitcode is not None]
            if not all((folder / f"{local}.result").exists() for local in ended):
                break
            running = [local for local in running if local not in ended]
        return [process.exitcode for process in processes]
    finally:
        _end(processes)


@contextmanager
def quiet_forks() -> Iterator[None]:
    """Silence Python's warning, since 3.12, about each fork of a process that has threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        yield


def _serve_store(launch: FunctionLaunch) -> TCPStore | None:
    """Serve the store of one machine; of several, rank 0 serves it."""
    if launch.machines > 1:
        return None
    store = serve_store(launch.host, launch.port, one_machine=True)
    if store is None:
        raise RuntimeError(
            f"{launch.launcher}: port {launch.port} of {launch.host} is taken, perhaps by another "
            "run. Give another use_port=, or none to get a free one."
        )
    return store


def _variables(launch: FunctionLaunch) -> dict[str, str]:
    chosen = {"OMP_NUM_THREADS": "1"}
    if launch.machines == 1:
        chosen |= loopback_variables()
    else:
        chosen |= gloo_variables(launch.host, os.environ)
    return {**chosen, **{k: os.environ[k] for k in chosen if k in os.environ}, **launch.environment}


def _end(processes: Sequence[Any]) -> None:
    """End the processes that still run."""
    deadline = time.monotonic() + _GRACE
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # a second Ctrl-C interrupts the wait
        for process in processes:
            process.kill()
            process.join()


def _first_error(launch: FunctionLaunch, folder: Path, codes: Sequence[int | None]) -> RemoteError:
    """Return the error to raise, that of the rank that failed first.

    A rank that ended without a report comes before the others: it was killed, and they report no
    more than a lost connection. But a watchdog of NCCL or gloo also ends a rank whose peer failed.
    """
    first = launch.node_rank * launch.processes
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    reports.sort(key=lambda report: (report["repeats"], report["when"]))
    for local, code in enumerate(codes):
        has_written = any((folder / f"{local}.{end}").exists() for end in ("json", "result"))
        if code is not None and not has_written and not (reports and code in _AFTERMATH):
            reports.insert(0, {"rank": first + local, "text": _describe_exit(code)})
            break
    rank, text = reports[0]["rank"], reports[0]["text"]
    above = "\n" if "\n" in text else ""
    return RemoteError(rank=rank, where=launch.launcher, details=above + text)


def _describe_exit(code: int) -> str:
    """Describe how a process ended that left no report."""
    if code >= 0:
        return f"it exited with code {code or _INTERRUPTED}"
    hint = ", which often means out of memory: try smaller batches or fewer processes"
    name = signal.Signals(-code).name
    return f"it was killed by {name}" + (hint if name == "SIGKILL" else "")


# --- in the processes -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Process:
    """What a process does; pickled where processes are spawned, so not a closure.

    Args:
        launch: what all processes have in common.
        folder: where it writes its result, or its error.
        port: where the processes meet.
    """

    launch: FunctionLaunch
    folder: Path
    port: int

    def __call__(self, local: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Call the function, and write its result or its error."""
        launch = self.launch
        rank = launch.node_rank * launch.processes + local
        world = launch.machines * launch.processes
        _reset_signals()
        _label_streams(launch.prefix, rank, local)
        # If the parent has computed with the threads of OpenMP, forks would wait for them for ever.
        torch.set_num_threads(1)
        place = rank_variables(rank, world, local, launch.processes, launch.host, self.port)
        try:
            with changed_environment(place):
                result = _pickle(_call(function, args))
                destroy_topology()
        except KeyboardInterrupt:
            # No traceback of each process: the launching one raises it too, or is gone.
            raise SystemExit(_INTERRUPTED) from None
        except BaseException as error:
            self._report(rank, local, error)
            # Exit with an error, but not by one: torch's wrapper would write another traceback.
            raise SystemExit(1) from None
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        self._write(f"{local}.result", result)

    def _report(self, rank: int, local: int, error: BaseException) -> None:
        """Write the error; one that another rank has told counts as that rank's."""
        trace = error.__traceback__
        while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _HERE:
            trace = trace.tb_next
        repeats = isinstance(error, RemoteError) and error.rank is not None
        report = {
            "rank": getattr(error, "rank", rank) if repeats else rank,
            "when": time.time(),
            "repeats": repeats,
            "text": published_text(error, trace).rstrip(),
        }
        self._write(f"{local}.json", json.dumps(report).encode())

    def _write(self, name: str, content: bytes) -> None:
        """Write a file that other processes see complete, or not at all."""
        temporary = self.folder / f"{name}.new"
        temporary.write_bytes(content)
        replace(temporary, self.folder / name)


def _reset_signals() -> None:
    """Restore the default handlers, and end with the launching process.

    A fork inherits the handlers of an event loop, which would tell the loop of the kernel. torch
    asks for SIGINT at the end of the parent, which Python does not see while it waits in C++.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    _prctl_pr_set_pdeathsig(signal.SIGTERM)


def _call(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call the function, for which ``sys.exit(0)`` is a return."""
    try:
        return function(*args)
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        raise


def _label_streams(prefix: str, rank: int, local: int) -> None:
    """Write whole lines: a notebook's streams send each piece at once, which would mix ranks'."""
    label = string.Template(prefix).safe_substitute(rank=rank, local_rank=local)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if label or not isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, LabeledStream(stream, label))


class LabeledStream:
    """Pass text on to a stream line by line, or when flushed, each line with a label.

    Args:
        stream: where the text goes; it has all that is not here.
        label: in front of each line.
    """

    def __init__(self, stream: Any, label: str = "") -> None:
        self._stream = stream
        self._label = label
        self._pending = ""

    def write(self, text: str) -> int:
        """Write complete lines; buffer the rest."""
        *lines, self._pending = (self._pending + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._label}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        pending, self._pending = self._pending, ""
        if pending:
            self._stream.write(self._label + pending)
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# --- results ----------------------------------------------------------------------------------


class _ResultPickler(pickle.Pickler):
    """Pickle tensors on the CPU and without gradients, wherever in the value they are.

    The launching process must not use the device: forks of a later launch could not.
    """

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter, (value.detach(), value.requires_grad)
        if kind is torch.Tensor and (value.requires_grad or value.device.type not in _PLAIN):
            return torch.Tensor.detach, (value.detach().cpu(),)
        return NotImplemented


def _pickle(value: Any) -> bytes:
    """Pickle the result here, where a failure can still be reported.

    Raises:
        TypeError: the value cannot be pickled.
    """
    content = io.BytesIO()
    try:
        _ResultPickler(content).dump(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be sent from its "
            f"process to the notebook ({type(error).__name__}: {error}). Return numbers, text, "
            "lists, dicts and tensors; save models to a file."
        ) from None
    return content.getvalue()
