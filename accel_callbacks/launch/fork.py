"""A function on forked processes, and its result."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import socket
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
from accel_callbacks.launch.environment import changed_environment
from accel_callbacks.launch.fork_safety import left_as_it_was

__all__ = ["ForkPlan", "InFork", "LastWords", "Parcel", "WholeLines", "run_forked"]

_HERE = Path(__file__).parent
_AFTERMATH = (signal.SIGTERM, signal.SIGABRT)  # the failure of another process can lead to these


class Ended(Protocol):
    """The part of torch's ``ProcessFailure`` that is read here."""

    @property
    def exitcode(self) -> int:
        """Exit code; -n for signal n."""


class _Words(NamedTuple):
    rank: int
    when: float
    secondary: bool
    summary: str
    text: str
    gone: list[int]


class LastWords:
    """The folder, seen from a process that writes to it, and from the launcher that reads.

    Args:
        folder: an empty one, for one launch.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from accel_callbacks.launch.fork import LastWords
        >>> words = LastWords(Path(tempfile.mkdtemp()))
        >>> words.began(rank=0)
        >>> _ = words.failed(0, ValueError("no data"))
        >>> print(words.explain({}, "notebook_launcher"))
        rank 0 failed in notebook_launcher: ValueError: no data
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of_attempt(self, number: int) -> LastWords:
        """In a process: the words of this start, apart from those of the starts before it."""
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        return LastWords(folder)

    def of_last_attempt(self) -> LastWords:
        """In the launcher: the words of the last start, which may be the only one."""
        numbers = [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]
        return LastWords(self.folder / str(max(numbers))) if numbers else self

    def began(self, rank: int) -> None:
        """In a process: it is there."""
        (self.folder / f"{rank}.pid").write_text(str(os.getpid()))

    def failed(self, rank: int, error: BaseException) -> str:
        """In a process: the traceback of the function, which is returned too."""
        when = time.time()
        trace = error.__traceback__
        while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _HERE:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        time.sleep(0.05)  # a killed peer loses its connections just before it is seen to be dead
        words = _Words(rank, when, isinstance(error, RemoteError), summary, text, self._gone(rank))
        unready = self.folder / f"{rank}.new"
        unready.write_text(json.dumps(words._asdict()))
        os.replace(unready, self.folder / f"{rank}.json")
        return text

    def _gone(self, rank: int) -> list[int]:
        """Other ranks that are dead and have left no words."""
        pids = {int(path.stem): path.read_text() for path in self.folder.glob("*.pid")}
        quiet = [one for one in pids if one != rank and not (self.folder / f"{one}.json").exists()]
        return sorted(one for one in quiet if _is_dead(pids[one]))

    def explain(self, ended: Mapping[int, Ended], where: str) -> RemoteError:
        """In the launcher: the error to raise, that of the process which failed first.

        Args:
            ended: how processes ended, by rank, as far as torch's launcher knows.
            where: which call it is that failed.
        """
        found = [_Words(**json.loads(p.read_text())) for p in self.folder.glob("*.json")]
        found.sort(key=lambda words: (words.secondary, words.when))
        gone = found[0].gone if found else []
        spoken = {words.rank for words in found}
        codes = {rank: one.exitcode for rank, one in ended.items() if rank not in spoken}
        late = [r for r in codes if found and r not in gone and -codes[r] in _AFTERMATH]
        mute = [rank for rank in dict.fromkeys([*gone, *codes]) if rank not in late]
        if mute:
            mute.sort(key=lambda rank: codes.get(rank, 0) >= 0)  # those first that were killed
            also = "".join(f"\nthen rank {words.rank} failed: {words.summary}" for words in found)
            return _error(mute[0], where, _how(codes.get(mute[0])) + also)
        if not found:
            return _error(0, where, "a process ended, and left no error")
        first, others = found[0], sorted(words.rank for words in found[1:])
        after = [f"(then also rank {', '.join(map(str, others))})"] if others else []
        after += [f"(also rank {rank}: {_how(codes[rank])})" for rank in late]
        lines = [*after, first.text]
        below = [""] if "\n" in first.text and not after else []
        return _error(first.rank, where, "\n".join([*below, *lines]))


def _error(rank: int, where: str, details: str) -> RemoteError:
    return RemoteError(rank=rank, where=where, details=details)


def _how(code: int | None) -> str:
    """How a process ended that said nothing."""
    if code == -signal.SIGKILL or code is None:
        name = "it was killed by SIGKILL" if code is not None else "it was killed, or left at once"
        return f"{name}, which often means out of memory: try smaller batches or fewer processes"
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"


def _is_dead(pid: str) -> bool:
    """Whether a process has ended; a parent that has not yet noticed keeps its number."""
    if sys.platform != "linux":
        return False
    try:
        status: Any = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return status in ("Z", "X")


class Parcel:
    """A value, packed where a failure to do so can still be told; it arrives unpacked.

    Tensors arrive on the CPU and without gradients, wherever in the value they are. They travel as
    bytes: shared memory would keep one open file a tensor, and the device memory of a process is
    gone when it ends.

    Args:
        value: what a function has returned.

    Raises:
        TypeError: it cannot leave its process.

    Example:
        >>> import torch
        >>> from multiprocessing.reduction import ForkingPickler
        >>> from accel_callbacks.launch.fork import Parcel
        >>> ForkingPickler.loads(ForkingPickler.dumps(Parcel({"loss": torch.tensor(0.5)})))
        {'loss': tensor(0.5000)}
    """

    def __init__(self, value: Any) -> None:
        packed = io.BytesIO()
        try:
            _Packer(packed).dump(value)
        except Exception as error:
            raise TypeError(
                f"the function returned a {type(value).__name__} that cannot be handed from its "
                f"process to the notebook ({type(error).__name__}: {error}). Return numbers, text, "
                "lists, dicts and tensors; save models to a file."
            ) from None
        self._data = packed.getvalue()

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return ForkingPickler.loads, (self._data,)


class _Packer(ForkingPickler):
    """Tensors as bytes, where they are plain ones; the others as torch hands them on."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter, (value.detach(), value.requires_grad)
        if kind is not torch.Tensor or value.is_meta:
            return NotImplemented
        here = value.detach().cpu()
        if here.layout is not torch.strided or here.is_quantized:
            return reduce_tensor(here)  # type: ignore[no-untyped-call]
        plain = here.resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _unpack, (data, plain.dtype, tuple(plain.shape))


def _unpack(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


@dataclass(frozen=True)
class InFork:
    """How a process begins and ends around the function that it is for.

    Args:
        words: where it leaves its error.
        threads: with which torch computes here.
        redirected: torch's launcher reads what this process writes.
        outspoken: show an error at once too; it may be followed by another attempt.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from accel_callbacks.launch.fork import InFork
        >>> InFork(LastWords(Path(tempfile.mkdtemp())), threads=1).outspoken
        False
    """

    words: LastWords
    threads: int
    redirected: bool = False
    outspoken: bool = False

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Parcel:
        """The function's result, packed; its error is left for the launcher, and raised."""
        rank = int(os.environ["RANK"])
        _plain_signals()
        (_read_by_launcher if self.redirected else _in_whole_lines)()
        torch.set_num_threads(self.threads)
        words = self.words.of_attempt(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        words.began(rank)
        try:
            parcel = _packed(function, args)
        except KeyboardInterrupt:
            # Torch's launcher would take this for a success, and wait for its result for ever.
            raise SystemExit(128 + signal.SIGINT) from None
        except BaseException as error:
            text = words.failed(rank, error)
            if self.outspoken:
                print(f"rank {rank} failed:\n{text}", file=sys.stderr)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        destroy_topology()
        return parcel


def _packed(function: Callable[..., Any], args: Sequence[Any]) -> Parcel:
    try:
        return Parcel(function(*args))
    except SystemExit as end:
        if end.code in (None, 0):
            return Parcel(None)
        raise


def _plain_signals() -> None:
    """The handlers of torch's launcher are for itself; here they would raise in the function."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def _read_by_launcher() -> None:
    """Torch redirects the file that a stream names; a notebook's stream does not write to it."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        redirected = getattr(sys, name).fileno()
        if redirected != number:
            os.dup2(redirected, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def _in_whole_lines() -> None:
    """A notebook's streams send each piece of a line at once: processes would mix their lines."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, WholeLines(stream))


class WholeLines(io.TextIOBase):
    """A stream that hands text on by the line, or when it is flushed.

    Args:
        stream: what the text is for.

    Example:
        >>> import io
        >>> from accel_callbacks.launch.fork import WholeLines
        >>> below = io.StringIO()
        >>> lines = WholeLines(below)
        >>> _ = lines.write("half a "), lines.write("line, ")
        >>> below.getvalue()
        ''
        >>> _ = lines.write("whole\\nrest")
        >>> below.getvalue()
        'half a line, whole\\n'
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._kept = ""

    def write(self, text: str) -> int:
        """Keep what is not yet a line."""
        lines, newline, rest = text.rpartition("\n")
        if newline:
            self._hand_on(self._kept + lines + newline)
            self._kept = ""
        self._kept += rest
        return len(text)

    def flush(self) -> None:
        """Hand on what is there."""
        kept, self._kept = self._kept, ""
        if kept:
            self._hand_on(kept)

    def _hand_on(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def writable(self) -> bool:
        """It is."""
        return True

    def isatty(self) -> bool:
        """As the stream below."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """As the stream below."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As the stream below."""
        return getattr(self._stream, "encoding", None) or "utf-8"


@dataclass(frozen=True)
class ForkPlan:
    """How many processes there are, where they meet, and what they are given.

    Args:
        where: the call that the errors name.
        processes: on this machine.
        machines: that take part.
        backend: by which they find each other.
        endpoint: where; on one machine a free port of its own.
        conf: more options of the rendezvous.
        run_id: the same on all machines.
        environment: variables of the processes.
        threads: with which each computes.
        max_restarts: how often all are started again after a failure.
        monitor_interval: seconds between two looks at them.
        prefix: of each line that they write.
        on_cpu: the processes use no accelerator.

    Example:
        >>> from accel_callbacks.launch.fork import ForkPlan
        >>> ForkPlan(where="debug_launcher", processes=2).endpoint
        'localhost:0'
    """

    where: str
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


def run_forked(plan: ForkPlan, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Call a function on forked processes; what it returned on each of this machine, by rank.

    Raises:
        RemoteError: a process failed; the traceback is in the text.
        RuntimeError: the processes did not find each other.
        KeyboardInterrupt: a Ctrl-C came; the processes have ended.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    _check_streams(plan)
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="accel-") as folder:
        words = LastWords(Path(tempfile.mkdtemp(dir=folder)))

        def entry() -> Parcel:
            first = InFork(
                words,
                threads=plan.threads,
                redirected=plan.prefix is not None,
                outspoken=plan.max_restarts > 0,
            )
            return first.call(function, args)

        failed: Mapping[int, Any] = {}
        with changed_environment(_environment(plan)), left_as_it_was():
            if plan.on_cpu:
                # DDP imports it, which takes seconds: once here, or each time in each process.
                importlib.import_module("torch._dynamo")
            try:
                found = elastic_launch(_configuration(plan, folder), entry)()
                return [found[rank] for rank in sorted(found)]
            except ChildFailedError as error:
                failed = error.failures
            except (DistError, RendezvousError, RuntimeError) as error:
                problem = _not_met(plan, error)
                raise problem from (None if problem is error else error)
        raise words.of_last_attempt().explain(failed, plan.where)


def _check_streams(plan: ForkPlan) -> None:
    try:
        _ = plan.prefix and (sys.stdout.fileno(), sys.stderr.fileno())
    except (AttributeError, OSError):
        raise RuntimeError(
            f"{plan.where}: log_line_prefix_template needs an output that is a file, which that of "
            "this notebook is not. Leave it out, and let the function print the rank."
        ) from None


def _environment(plan: ForkPlan) -> dict[str, str]:
    chosen = {"OMP_NUM_THREADS": str(plan.threads)}
    if plan.machines == 1 and any(name == "lo" for _, name in socket.if_nameindex()):
        chosen["GLOO_SOCKET_IFNAME"] = "lo"  # the name of this machine may lead nowhere
    return {**chosen, **{k: os.environ[k] for k in chosen if k in os.environ}, **plan.environment}


def _configuration(plan: ForkPlan, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    # Without this torch asks CUDA itself whether it is there, which spoils it for the forks.
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
            start_method="fork",
            log_line_prefix_template=plan.prefix,
            local_addr="127.0.0.1" if plan.machines == 1 else None,
        )
    if hasattr(config, "numa_options"):
        config.numa_options = None
    return config


def _not_met(plan: ForkPlan, error: Exception) -> Exception:
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if "EADDRINUSE" in str(error):  # torch 2.6 raises it as a mere RuntimeError
        return RuntimeError(
            f"{plan.where}: the port of {plan.endpoint} is taken, perhaps by another run. Give "
            "another use_port=, or none on one machine, to get a free one."
        )
    if not isinstance(error, DistError | RendezvousError):
        return error
    why = str(error).rstrip(".")
    return RuntimeError(
        f"{plan.where}: the processes did not find each other: {why}. On several machines, run "
        "the cell on each, with the same master_addr and use_port, and its own node_rank."
    )
