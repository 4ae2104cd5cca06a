"""What the library does, in counts that no load disturbs: opcodes, fsyncs, collectives, bytes.

    python benchmarks/counts.py             print the counts, beside those of counts.json
    python benchmarks/counts.py --check     fail where a count has grown
    python benchmarks/counts.py --write     write counts.json

The opcodes and Python calls of a step are those inside of our packages, in the median of 40 steady
steps. Those of a batch are all that a pass over the prepared loader adds to one over torch's. The
collectives are those of the default group that rank 1 of two takes part in. The bytes that a rank
receives are of a save by ranks that are threads, in pickle. A count depends on the versions of
Python and torch: ``counts.json`` holds it for some pairs of versions, others are printed only.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

Run = Callable[[], None]
Counts = dict[str, int]

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "counts.json"
VERSIONS = f"Python 3.{sys.version_info.minor}, torch {torch.__version__.split('+')[0]}"
STEADY = 40  # steps or batches of which the median is taken
WARM_UP = 10


class OpcodeCounter:
    """The opcodes and Python calls of each step of a run, on the thread that runs it.

    A call is a frame that is entered, or a generator that is resumed. A step is from one call of a
    function to the next one.

    Args:
        folders: count only code below them; all code without any.
        mark: the function that begins a step.
    """

    def __init__(self, *folders: Path, mark: CodeType = nn.Sequential.forward.__code__) -> None:
        self._folders = tuple(f"{folder}{os.sep}" for folder in folders) or ("",)
        self._mark = mark
        self._opcodes = self._calls = 0
        self._marks: list[tuple[int, int]] = []

    def of(self, run: Run) -> list[tuple[int, int]]:
        """Return the opcodes and calls of each step of a run but the last."""
        before = sys.gettrace()
        self._marks.clear()
        gc.collect()
        gc.disable()  # finalizers would be counted wherever they happen to run
        sys.settrace(self._enter)
        try:
            run()
        finally:
            sys.settrace(before)
            gc.enable()
        pairs = itertools.pairwise(self._marks)
        return [(end[0] - start[0], end[1] - start[1]) for start, end in pairs]

    def steady(self, run: Run) -> tuple[int, int, float]:
        """Return both of a steady step, and the mean opcodes; the run has 60 steps or more."""
        run()
        steps = self.of(run)[WARM_UP : WARM_UP + STEADY]
        opcodes, calls = zip(*steps, strict=True)
        # A few opcodes depend on the clock, such as those that note the slowest call of a hook.
        return (
            statistics.median_low(opcodes),
            statistics.median_low(calls),
            statistics.mean(opcodes),
        )

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is self._mark:
            self._marks.append((self._opcodes, self._calls))
        if not frame.f_code.co_filename.startswith(self._folders):
            return None
        self._calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: object) -> Any:
        self._opcodes += event == "opcode"
        return self._inside


# --- a training step --------------------------------------------------------------------------


def parts(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, object]:
    """Return a model, its optimizer, a loader of so many batches and a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(steps * 8, 32)), batch_size=8)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 10_000)


def loop(accelerator: Any, steps: int, *, clip: bool = False, log: bool = False) -> Run:
    """Return the loop of Accelerate's quick tour, which is ours too."""
    model, optimizer, loader, scheduler = accelerator.prepare(*parts(steps))

    def run() -> None:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if log:
                accelerator.log({"loss": loss})

    return run


def counting_callbacks(number: int) -> list[Any]:
    """Return callbacks that count the training batches."""
    from accel_callbacks import Callback

    class Counter(Callback):
        count = 0

        def on_train_batch_end(self, run, model, outputs, batch, batch_idx):  # type: ignore[no-untyped-def]
            self.count += 1

    return [Counter() for _ in range(number)]


def packages() -> list[Path]:
    """Return the folders of our packages, as they are imported."""
    import accel_callbacks
    import checkpoint_io
    import loggers

    return [Path(one.__file__).parent for one in (accel_callbacks, checkpoint_io, loggers)]


def steps(folder: Path) -> Counts:
    """Count a training step of each kind, inside of our packages."""
    from accel_callbacks import Accelerator

    number = STEADY + 2 * WARM_UP
    kinds: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
        "a step": ({}, {}),
        "a step that clips": ({}, {"clip": True}),
        "a step with a callback": ({"callbacks": counting_callbacks(1)}, {}),
        "a step with ten callbacks": ({"callbacks": counting_callbacks(10)}, {}),
        "a step with ten callbacks, JSONL and log()": (
            {"callbacks": counting_callbacks(10), "log_with": "jsonl", "project_dir": folder},
            {"log": True},
        ),
    }
    counts = {}
    for name, (options, body) in kinds.items():
        accelerator = Accelerator(cpu=True, **options)
        if "log_with" in options:
            accelerator.init_trackers("counts")
        opcodes, calls, _ = OpcodeCounter(*packages()).steady(loop(accelerator, number, **body))
        accelerator.end_training()
        counts |= {f"opcodes of {name}": opcodes, f"calls of {name}": calls}
    for journal, name in ((False, "a step of a run"), (True, "a step of a run with a journal")):
        accelerator = Accelerator(cpu=True, project_dir=folder, journal=journal)
        with accelerator.run("counts"):
            opcodes, calls, _ = OpcodeCounter(*packages()).steady(loop(accelerator, number))
        counts |= {f"opcodes of {name}": opcodes, f"calls of {name}": calls}
    return counts


# --- a batch of a loader ----------------------------------------------------------------------


class Rows(Dataset):
    """A map-style dataset."""

    def __len__(self) -> int:
        return 4 * (STEADY + 2 * WARM_UP)

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    """A dataset without an index."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * (STEADY + 2 * WARM_UP)))


def _next_batch() -> None:
    """Mark the beginning of a batch."""


def reading(loader: Any) -> Run:
    """Return a pass over a loader that does nothing with the batches."""

    def run() -> None:
        for _ in loader:
            _next_batch()

    return run


def batch(loader: Any) -> int:
    """Count the opcodes of all Python in a steady batch."""
    return OpcodeCounter(mark=_next_batch.__code__).steady(reading(loader))[0]


def batches(options: Mapping[str, Any], kinds: Mapping[str, type]) -> Counts:
    """Count the opcodes that preparing a loader adds to each batch."""
    from accel_callbacks import Accelerator

    counts = {}
    for name, kind in kinds.items():
        plain = DataLoader(kind(), batch_size=2)
        accelerator = Accelerator(cpu=True, **options)
        added = batch(accelerator.prepare(plain)) - batch(plain)
        counts[f"opcodes added to a batch, {name}"] = added
        accelerator.end_training()
    return counts


# --- two ranks --------------------------------------------------------------------------------


def of_two_ranks() -> Counts:
    """Count on rank 1 of two forked processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")  # which has imported torch already
    results = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, port, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("A rank of two failed, see above.")
    counts: Counts = results.get()
    return counts


def _rank(rank: int, port: int, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from accel_callbacks import Accelerator, Callback, DataLoaderConfiguration

    class Voter(Callback):
        can_vote = True

    counts = {}
    for name, callbacks in {"a step": [], "a step that votes": [Voter()]}.items():
        accelerator = Accelerator(cpu=True, callbacks=callbacks)
        counts[f"collectives of {name}, 2 ranks"] = _collectives(accelerator)
        accelerator.end_training()
    options = {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}
    counts |= batches(options, {"dispatched by rank 0": Rows})
    if rank:
        results.put(counts)


def _collectives(accelerator: Any) -> int:
    """Count the collectives of the default group in a steady step."""
    group: Any = torch.distributed.group.WORLD
    run = loop(accelerator, 2 * (STEADY + 2 * WARM_UP))
    numbers: list[int] = []
    accelerator.models[0].register_forward_pre_hook(
        lambda *_: numbers.append(group._get_sequence_number_for_group())
    )
    run()
    each = [after - before for before, after in itertools.pairwise(numbers)]
    return statistics.median_low(each[WARM_UP:])


# --- saves ------------------------------------------------------------------------------------


class FileCounter:
    """The fsyncs, opened files and listed folders of this process, below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._names = {"open": "opens", "os.listdir": "listings", "os.scandir": "listings"}
        self._counts: Counts = {}
        self._active = False
        sys.addaudithook(self._note)

    def of(self, action: Callable[[], object]) -> Counts:
        """Return the counts of a call."""
        self._counts = dict.fromkeys(("opens", "listings", "fsyncs"), 0)
        fsync, self._active = os.fsync, True

        def counted(descriptor: int) -> None:
            self._counts["fsyncs"] += 1
            fsync(descriptor)

        os.fsync = counted
        try:
            action()
        finally:
            os.fsync, self._active = fsync, False
        return self._counts

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._active and event in self._names and self._folder in str(arguments[0]):
            self._counts[self._names[event]] += 1


def saves(folder: Path) -> Counts:
    """Count the file operations of small saves, and of the newest of ten checkpoints."""
    from accel_callbacks import Accelerator
    from checkpoint_io import CheckpointFolder

    accelerator = Accelerator(cpu=True)
    run = loop(accelerator, 2)
    run()
    files = FileCounter(folder)
    state = {"weight": torch.ones(4)}
    checkpoints = CheckpointFolder(folder / "many")

    def save(step: int) -> None:
        checkpoints.save(step, state, metadata={"run_id": "counts"})

    for step in range(10):
        save(step)
    actions: dict[str, Callable[[], object]] = {
        "save_state": lambda: accelerator.save_state(folder / "state"),
        "CheckpointFolder.save beside ten": lambda: save(10),
        "a new CheckpointFolder's latest() of eleven": CheckpointFolder(folder / "many").latest,
    }
    return {
        f"{kind} of {name}": count
        for name, action in actions.items()
        for kind, count in files.of(action).items()
    }


class ThreadGroup:
    """The group of a rank that is a thread; counts the bytes that it receives."""

    def __init__(self, rank: int, world_size: int, shared: SharedObjects) -> None:
        self.rank, self.world_size, self._shared = rank, world_size, shared
        self.received = 0

    def all_gather_object(self, obj: Any) -> list[Any]:
        sent = self._shared.exchange(self.rank, pickle.dumps(obj, protocol=4))
        self.received += sum(len(data) for data in sent) - len(sent[self.rank])
        return [pickle.loads(data) for data in sent]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        data = pickle.dumps(obj if self.rank == src else None, protocol=4)
        data = self._shared.exchange(self.rank, data)[src]
        self.received += len(data) if self.rank != src else 0
        return pickle.loads(data)


class SharedObjects:
    """What the ranks of a collective have passed."""

    def __init__(self, world_size: int) -> None:
        self._objects = [b""] * world_size
        self._barrier = threading.Barrier(world_size, timeout=60)

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        self._objects[rank] = data
        self._barrier.wait()
        objects = list(self._objects)
        self._barrier.wait()
        return objects


def received(folder: Path, world_size: int) -> Counts:
    """Count the bytes that the last rank receives for a first save and for the next one."""
    from checkpoint_io import save
    from checkpoint_io.saver import plan

    plan._CACHE_SIZE = 2 * world_size  # real ranks have a cache each
    shared = SharedObjects(world_size)
    groups = [ThreadGroup(rank, world_size, shared) for rank in range(world_size)]
    # Of the size from which replicated tensors are spread over the ranks.
    state = {f"layers.{number}.weight": torch.ones(128, 128) for number in range(64)}

    def save_twice(group: ThreadGroup) -> list[int]:
        counts = []
        for step in (1, 2):
            before = group.received
            save(
                folder / f"{world_size}-{step}",
                state,
                local_state={"random": torch.ones(16)},
                group=group,
                metadata={"step": step},
            )
            counts.append(group.received - before)
        return counts

    with ThreadPoolExecutor(world_size) as threads:
        first, second = list(threads.map(save_twice, groups))[-1]
    ranks = f"{world_size} ranks"
    return {
        f"bytes that a rank of {ranks} receives for a first save": first,
        f"bytes that a rank of {ranks} receives for a next save": second,
    }


# --- imports ----------------------------------------------------------------------------------

_IMPORTS = """
import sys, torch
def ours():
    names = ("accel_callbacks", "checkpoint_io", "loggers")
    return sum(name.split(".")[0] in names for name in sys.modules)
import accel_callbacks
print(ours())
from accel_callbacks import Accelerator
Accelerator(cpu=True)
print(ours())
"""


class FreshInterpreter:
    """Counts our modules that an import and an Accelerator load, beside what this process does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IMPORTS], stdout=subprocess.PIPE, text=True
        )

    def modules(self) -> Counts:
        """Wait, and return the counts."""
        printed, _ = self._process.communicate()
        if self._process.returncode:
            raise SystemExit("The import failed, see above.")
        imported, constructed = map(int, printed.split())
        return {
            "modules of `import accel_callbacks`": imported,
            "modules of `Accelerator()`": constructed,
        }


# --- the record -------------------------------------------------------------------------------


def measure() -> Counts:
    """Return all counts."""
    interpreter = FreshInterpreter()
    counts = of_two_ranks()  # before the rest: they are forks of a process without threads
    folder = Path(tempfile.mkdtemp(prefix="counts-"))
    try:
        counts |= steps(folder)
        counts |= batches({}, {"map-style": Rows, "iterable": Stream})
        counts |= saves(folder)
        for world_size in (4, 64):
            counts |= received(folder, world_size)
    finally:
        shutil.rmtree(folder)
    return counts | interpreter.modules()


def recorded() -> Counts | None:
    """Return the recorded counts for these versions, None if there are none."""
    known: Counts | None = _record().get(VERSIONS)
    return known


def _record() -> dict[str, Counts]:
    record: dict[str, Counts] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def write(counts: Counts) -> None:
    """Record the counts for these versions; those of others stay."""
    RECORD.write_text(json.dumps({**_record(), VERSIONS: counts}, indent=2) + "\n")


def grown(counts: Counts, known: Counts) -> list[str]:
    """Return a line for each count that is larger than the recorded one, or not recorded."""
    return [
        f"{name}: {count}, recorded {known.get(name)}"
        for name, count in counts.items()
        if count > known.get(name, -1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="fail where a count has grown")
    action.add_argument("--write", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = measure()
    if options.write:
        write(counts)
    known = recorded()
    print(f"{VERSIONS}{'' if known else f', of which {RECORD.name} has no counts'}")
    for name, count in counts.items():
        before = (known or {}).get(name, count)
        print(f"{count:9}  {name}{'' if count == before else f'   (recorded: {before})'}")
    if options.check and known and (lines := grown(counts, known)):
        raise SystemExit(
            "These counts have grown:\n    " + "\n    ".join(lines) + "\nTake the growth back, or, "
            "if it is worth it, record it: `python benchmarks/counts.py --write`."
        )


if __name__ == "__main__":
    main()
