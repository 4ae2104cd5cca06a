"""Run a function on forked processes, and return its results or raise the error of the first."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import torch
from torch.multiprocessing.reductions import reduce_tensor

from accel_callbacks.distributed.topology import destroy_topology
from accel_callbacks.errors import RemoteError
from accel_callbacks.errors.text import published_text
from accel_callbacks.launch.environment import (
    OWN_STORES,
    changed_environment,
    loopback_variables,
)
from accel_callbacks.launch.fork_safety import isolated_launcher
from accel_callbacks.launch.interface import gloo_variables
from accel_callbacks.launch.launch_folder import launch_folder
from checkpoint_io.local_files import replace

__all__ = ["ErrorReports", "ForkPlan", "ForkedWorker", "LineBuffered", "PackedResult", "run_forked"]

_HERE = Path(__file__).parent
_SIGKILL = 9  # without a name on Windows
_AFTERMATH = (signal.SIGTERM, signal.SIGABRT)  # the failure of another rank can lead to these


# --- in the launching process -----------------------------------------------------------------


@dataclass(frozen=True)
class ForkPlan:
    """Number of processes, their rendezvous, and what each of them gets.

    Args:
        launcher: name of the launching function, for errors.
        processes: on this machine.
        machines: that take part.
        backend: of the rendezvous.
        endpoint: of the rendezvous; by default a free port of this machine.
        conf: more options of the rendezvous.
        run_id: the same on all machines.
        environment: variables of the processes.
        threads: torch threads of each process.
        max_restarts: how often all processes are restarted after a failure.
        monitor_interval: seconds between two polls of the processes.
        prefix: prepended to each line that a process writes.
        on_cpu: the processes use no accelerator.
        start_method: ``"fork"`` or ``"spawn"``.
    """

    launcher: str
    processes: int
    machines: int = 1
    backend: str = "c10d"
    endpoint: str = "localhost:0"
    conf: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = "none"
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    max_restarts: int = 0
    monitor_interval: float = 0.1
    prefix: str | None = None
    on_cpu: bool = False
    start_method: str = "fork"


def run_forked(plan: ForkPlan, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Call a function on forked processes; return the results of this machine, by rank.

    Raises:
        RemoteError: a process failed; the text contains its traceback.
        RuntimeError: the processes did not find each other.
        KeyboardInterrupt: Ctrl-C was pressed; the processes have ended.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    _check_streams(plan)
    # Otherwise each fork would inherit, and write, what is still in the buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    with launch_folder(Path(tempfile.gettempdir())) as folder:
        reports = ErrorReports(Path(tempfile.mkdtemp(dir=folder)))

        worker = ForkedWorker(
            reports,
            threads=plan.threads,
            redirected=plan.prefix is not None,
            print_errors=plan.max_restarts > 0,
        )
        # Not a closure: new processes unpickle it. Torch's launcher reads its name.
        entry = functools.update_wrapper(
            functools.partial(worker.call, function, args), worker.call
        )
        failed: Mapping[int, Any] = {}
        with changed_environment(_environment(plan)), isolated_launcher():
            if plan.on_cpu and plan.start_method == "fork":
                # DDP imports it, which takes seconds: import it once here, not in each process.
                importlib.import_module("torch._dynamo")
            try:
                results = elastic_launch(_configuration(plan, str(folder)), entry)()
                return [results[rank] for rank in sorted(results)]
            except ChildFailedError as error:
                failed = error.failures
            except (DistError, RendezvousError, RuntimeError) as error:
                problem = _rendezvous_failed(plan, error)
                raise problem from (None if problem is error else error)
        raise reports.last_attempt().error(failed, plan.launcher)


def _check_streams(plan: ForkPlan) -> None:
    if plan.prefix is not None and sys.platform != "linux":
        raise RuntimeError(
            f"{plan.launcher}: log_line_prefix_template does nothing here, as torch captures the "
            "output of functions on Linux only. Leave it out, and let the function print the rank."
        )
    try:
        _ = plan.prefix and (sys.stdout.fileno(), sys.stderr.fileno())
    except (AttributeError, OSError):
        raise RuntimeError(
            f"{plan.launcher}: log_line_prefix_template needs an output that is a file, which that "
            "of this notebook is not. Leave it out, and let the function print the rank."
        ) from None


def _environment(plan: ForkPlan) -> dict[str, str]:
    chosen = {"OMP_NUM_THREADS": str(plan.threads), **OWN_STORES}
    if plan.machines == 1:
        chosen |= loopback_variables()
    else:
        chosen |= gloo_variables(plan.endpoint.rpartition(":")[0], os.environ)
    return {**chosen, **{k: os.environ[k] for k in chosen if k in os.environ}, **plan.environment}


def _configuration(plan: ForkPlan, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    from accel_callbacks.launch.rendezvous_handler import listen_at_one_address

    # Without it torch queries CUDA itself, which then cannot be used in the forks.
    with changed_environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        config = LaunchConfig(
            min_nodes=plan.machines,
            max_nodes=plan.machines,
            nproc_per_node=plan.processes,
            logs_specs=DefaultLogsSpecs(folder, tee=Std.ALL if plan.prefix else Std.NONE),
            run_id=plan.run_id,
            rdzv_endpoint=plan.endpoint,
            rdzv_backend=plan.backend,
            rdzv_configs=dict(plan.conf),
            max_restarts=plan.max_restarts,
            monitor_interval=plan.monitor_interval,
            start_method=plan.start_method,
            log_line_prefix_template=plan.prefix,
            local_addr="127.0.0.1" if plan.machines == 1 else None,
        )
    if hasattr(config, "numa_options"):
        config.numa_options = None
    listen_at_one_address(config)
    return config


def _rendezvous_failed(plan: ForkPlan, error: Exception) -> Exception:
    """Return the error to raise for one of torch's launcher; the same if it means another."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if "EADDRINUSE" in str(error):  # torch 2.6 raises it as a plain RuntimeError
        return RuntimeError(
            f"{plan.launcher}: the port of {plan.endpoint} is taken, perhaps by another run. Give "
            "another use_port=, or none on one machine, to get a free one."
        )
    if not isinstance(error, DistError | RendezvousError):
        return error
    why = str(error).rstrip(".")
    return RuntimeError(
        f"{plan.launcher}: the processes did not find each other: {why}. On several machines, run "
        "the cell on each, with the same master_addr and use_port, and its own node_rank."
    )


# --- in the forked processes ------------------------------------------------------------------


@dataclass(frozen=True)
class ForkedWorker:
    """Set up a forked process, call the function there, and report its error.

    Args:
        reports: where errors are reported.
        threads: torch threads of this process.
        redirected: torch's launcher captures the output of this process.
        print_errors: print errors at once as well; another attempt may follow.
    """

    reports: ErrorReports
    threads: int
    redirected: bool = False
    print_errors: bool = False

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> PackedResult:
        """Call the function and pack its result; report and raise its error."""
        rank = int(os.environ["RANK"])
        _reset_signals()
        (_redirect_streams if self.redirected else _buffer_lines)()
        torch.set_num_threads(self.threads)
        reports = self.reports.attempt(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        reports.started(rank)
        try:
            result = _packed(function, args)
        except KeyboardInterrupt:
            # The launcher passes Ctrl-C on too, and a second one would interrupt the exit handlers.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            # Torch's launcher would take it for a success, and wait for the result forever.
            raise SystemExit(128 + signal.SIGINT) from None
        except BaseException as error:
            text = reports.failed(rank, error)
            if self.print_errors:
                print(f"rank {rank} failed:\n{text}", file=sys.stderr)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        destroy_topology()
        return result


def _packed(function: Callable[..., Any], args: Sequence[Any]) -> PackedResult:
    try:
        return PackedResult(function(*args))
    except SystemExit as end:
        if end.code in (None, 0):
            return PackedResult(None)
        raise


def _reset_signals() -> None:
    """Restore the default handlers: those of torch's launcher would raise in the function."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            plain = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
            signal.signal(number, plain)


def _redirect_streams() -> None:
    """Write to the descriptors that torch redirects; a notebook's streams do not use them."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        redirected = getattr(sys, name).fileno()
        if redirected != number:
            os.dup2(redirected, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def _buffer_lines() -> None:
    """Buffer a notebook's streams: they send each piece at once, which would mix ranks' lines."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, LineBuffered(stream))


class LineBuffered(io.TextIOBase):
    """Pass text on to a stream line by line, or when flushed.

    Args:
        stream: where the text goes.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._pending = ""

    def write(self, text: str) -> int:
        """Write complete lines; buffer the rest."""
        lines, newline, rest = text.rpartition("\n")
        if newline:
            self._pass_on(self._pending + lines + newline)
            self._pending = ""
        self._pending += rest
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        pending, self._pending = self._pending, ""
        if pending:
            self._pass_on(pending)

    def _pass_on(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return whether the underlying stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the underlying stream."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the underlying stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"


class PackedResult:
    """A return value, pickled where a failure can still be reported; unpickles to the value itself.

    Tensors arrive on the CPU and without gradients, wherever in the value they are. They travel as
    bytes: shared memory would keep one open file per tensor, and the device memory of a process is
    gone when it ends.

    Args:
        value: return value of a function.

    Raises:
        TypeError: the value cannot be pickled.
    """

    def __init__(self, value: Any) -> None:
        packed = io.BytesIO()
        try:
            _Packer(packed).dump(value)
        except Exception as error:
            raise TypeError(
                f"the function returned a {type(value).__name__} that cannot be sent from its "
                f"process to the notebook ({type(error).__name__}: {error}). Return numbers, text, "
                "lists, dicts and tensors; save models to a file."
            ) from None
        self._data = packed.getvalue()

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return ForkingPickler.loads, (self._data,)


class _Packer(ForkingPickler):
    """Pickle plain tensors as bytes, and all others as torch does."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter, (value.detach(), value.requires_grad)
        if kind is not torch.Tensor or value.is_meta:
            return NotImplemented
        tensor = value.detach().cpu()
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _unpack, (data, plain.dtype, tuple(plain.shape))


def _unpack(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


# --- errors, from the processes to the launcher -----------------------------------------------


class ExitStatus(Protocol):
    """The part of torch's ``ProcessFailure`` that is read here."""

    @property
    def exitcode(self) -> int:
        """Exit code; -n for signal n."""


class _Report(NamedTuple):
    rank: int
    when: float
    secondary: bool
    summary: str
    text: str
    dead_peers: list[int]


class ErrorReports:
    """A folder in which the ranks report their errors, and from which the launcher reads them.

    Torch's own error files do not suffice: with forked processes its launcher returns the failure
    of one rank only, and their timestamps have a resolution of one second.

    Args:
        folder: an empty folder for one launch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attempt(self, number: int) -> ErrorReports:
        """In a rank: return the reports of this attempt, separate from those of earlier ones."""
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        return ErrorReports(folder)

    def last_attempt(self) -> ErrorReports:
        """In the launcher: return the reports of the last attempt, which may be the only one."""
        numbers = [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]
        return ErrorReports(self.folder / str(max(numbers))) if numbers else self

    def started(self, rank: int) -> None:
        """In a rank: record the process id, by which peers see whether this rank is alive."""
        (self.folder / f"{rank}.pid").write_text(str(os.getpid()))

    def failed(self, rank: int, error: BaseException) -> str:
        """In a rank: report an error of the function; return its traceback."""
        when = time.time()
        trace = error.__traceback__
        while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _HERE:
            trace = trace.tb_next
        text = published_text(error, trace).rstrip()
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        # A killed peer loses its connections, which raised here, just before it becomes a zombie.
        time.sleep(0.05)
        secondary = isinstance(error, RemoteError)
        report = _Report(rank, when, secondary, summary, text, self._dead_peers(rank))
        temporary = self.folder / f"{rank}.new"
        temporary.write_text(json.dumps(report._asdict()))
        replace(temporary, self.folder / f"{rank}.json")
        return text

    def _dead_peers(self, rank: int) -> list[int]:
        """Return the other ranks that have ended without a report."""
        pids = {int(path.stem): path.read_text() for path in self.folder.glob("*.pid")}
        silent = [
            peer for peer in pids if peer != rank and not (self.folder / f"{peer}.json").exists()
        ]
        return sorted(peer for peer in silent if _is_dead(pids[peer]))

    def error(self, ended: Mapping[int, ExitStatus], launcher: str) -> RemoteError:
        """In the launcher: return the error to raise, that of the rank that failed first.

        Args:
            ended: how ranks ended, as far as torch's launcher knows.
            launcher: name of the launching function.
        """
        reports = [_Report(**json.loads(p.read_text())) for p in self.folder.glob("*.json")]
        reports.sort(key=lambda report: (report.secondary, report.when))
        dead = reports[0].dead_peers if reports else []
        reported = {report.rank for report in reports}
        codes = {rank: status.exitcode for rank, status in ended.items() if rank not in reported}
        late = [r for r in codes if reports and r not in dead and -codes[r] in _AFTERMATH]
        silent = [rank for rank in dict.fromkeys([*dead, *codes]) if rank not in late]
        if silent:
            silent.sort(key=lambda rank: codes.get(rank, 0) >= 0)  # killed ranks first
            also = "".join(
                f"\nthen rank {report.rank} failed: {report.summary}" for report in reports
            )
            return _error(silent[0], launcher, _how(codes.get(silent[0])) + also)
        if not reports:
            return _error(0, launcher, "a process ended, and left no error")
        first, others = reports[0], sorted(report.rank for report in reports[1:])
        after = [f"(then also rank {', '.join(map(str, others))})"] if others else []
        after += [f"(also rank {rank}: {_how(codes[rank])})" for rank in late]
        lines = [*after, first.text]
        below = [""] if "\n" in first.text and not after else []
        return _error(first.rank, launcher, "\n".join([*below, *lines]))


def _error(rank: int, launcher: str, details: str) -> RemoteError:
    return RemoteError(rank=rank, where=launcher, details=details)


def _how(code: int | None) -> str:
    """Describe how a process ended that left no report."""
    if code is None or code == -_SIGKILL:
        name = "it was killed by SIGKILL" if code is not None else "it was killed, or left at once"
        return f"{name}, which often means out of memory: try smaller batches or fewer processes"
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"


def _is_dead(pid: str) -> bool:
    """Return whether a process has ended, a zombie included."""
    if sys.platform != "linux":
        return False
    try:
        status: Any = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return status in ("Z", "X")
