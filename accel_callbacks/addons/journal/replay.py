"""Replay: run a past step again from the nearest checkpoint, and compare it with the journal."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh32_hexdigest

from accel_callbacks.addons.journal import REPLAY
from accel_callbacks.addons.journal.format import JournalError
from accel_callbacks.addons.journal.reader import Attempt, Journal
from loggers.redaction import HIDDEN

__all__ = [
    "Difference",
    "Replay",
    "ReplayRequest",
    "changes",
    "first_difference",
    "host_generators_differ",
]

#: What is compared in a row, from cause to effect: the name of a kind, and its fields.
_KINDS = (
    ("data", ("epoch", "batch", "position", "micro_batches")),
    ("random numbers", ("generators",)),
    ("learning rate", ("learning_rate", "learning_rates")),
    ("loss", ("loss", "losses")),
    ("gradient", ("gradient_norm",)),
    ("skipped step", ("flags",)),
)
_AFTER_DRAWS = ("loss", "gradient", "skipped step")
# Of the micro-batches of a step, of which a run that resumes inside of its window sees the last.
_OF_THE_WINDOW = {"micro_batches", "loss", "losses"}
_LOG_END = 3000  # characters of the processes' output in an error
# Set by a launcher for one process or one start alone.
_OF_A_RANK = (
    *(REPLAY, "ACCEL_DISTRIBUTED_TYPE", "ACCEL_LAUNCH_"),
    *("TORCHELASTIC", "TORCH_NCCL_ASYNC"),
)
_STARTS = (
    *("ACCEL_", "OMP_", "MKL_", "CUBLAS_", "PYTORCH_"),
    *("NVIDIA_TF32", "PYTHONHASHSEED", "ATEN_CPU_CAPABILITY"),
)
_WORKER = ("launch", "worker.py")  # by which the launcher starts the script of each rank


@dataclass(frozen=True)
class ReplayRequest:
    """The request of a replay.

    Args:
        folder: scratch folder in place of the project's.
        step: the optimizer step after which the processes end.
        checkpoint: where they begin; from the start of the run if None.
        dump: folder for activations and gradients of the step; none if None.
        modules: glob pattern for the names of modules whose outputs are dumped.
        stop: open the debugger in the step.
        rollbacks: the checkpoints that the run went back to, by the number of its steps then.
        commands: marks of what `accel ctl` had changed, in order.

    Example:
        >>> from accel_callbacks.addons.journal.replay import ReplayRequest
        >>> ReplayRequest.requested({}) is None
        True
    """

    folder: str
    step: int
    checkpoint: str | None = None
    dump: str | None = None
    modules: str = "*"
    stop: bool = False
    rollbacks: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def requested(cls, environment: Mapping[str, str]) -> ReplayRequest | None:
        """Return the request for this process, None outside of a replay."""
        path = environment.get(REPLAY)
        return None if path is None else cls(**json.loads(Path(path).read_text("utf-8")))

    def write(self, path: Path) -> None:
        """Write the request into a file."""
        path.write_text(json.dumps(asdict(self)), "utf-8")


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as it was.

    Args:
        step: the optimizer step.
        rank: of the process.
        kind: ``"data"``, ``"random numbers"``, ``"learning rate"``, ``"loss"``, ``"gradient"``,
            ``"skipped step"`` or ``"missing"``.
        then: values in the journal, by field.
        now: values of the replay.

    Example:
        >>> from accel_callbacks.addons.journal.replay import Difference
        >>> print(Difference(7, 0, "loss", {"loss": 2.5}, {"loss": 2.25}))
        step 7, rank 0: the loss differs first: loss 2.5 -> 2.25
    """

    step: int
    rank: int
    kind: str
    then: Mapping[str, Any]
    now: Mapping[str, Any]

    def __str__(self) -> str:
        changed = [f"{name} {self.then[name]} -> {self.now[name]}" for name in self.then]
        verb = "differ" if self.kind in ("data", "random numbers") else "differs"
        return (
            f"step {self.step}, rank {self.rank}: the {self.kind} {verb} first: "
            f"{', '.join(changed)}"
        )


def first_difference(then: Journal, now: Journal, first: int, last: int) -> Difference | None:
    """Return the first difference between the rows of two journals, None if they are equal.

    In one step causes come before effects: the data before the random numbers, these before the
    learning rate, then loss and gradient. Values are compared by their bits.

    Args:
        then: of the run.
        now: of the replay.
        first: the first step to compare.
        last: the last one.
    """
    ranks = range(now.attempts[-1].world_size)
    before = [_rows_by_step(then.rows(rank, repeated=False), first, last) for rank in ranks]
    after = [_rows_by_step(now.rows(rank, repeated=False), first, last) for rank in ranks]
    orders: set[tuple[int, int, int]] = set()  # those that were compared
    for step in range(first, last + 1):
        pair = [rows[0].get(step) for rows in (before, after)]
        if pair[0] is not None and pair[1] is not None:
            key = (int(pair[0]["attempt"]), int(pair[1]["attempt"]), int(pair[0]["epoch"]))
            if key not in orders:
                orders.add(key)
                facts = _order(then, key[0], key[2]), _order(now, key[1], key[2])
                shared = facts[0].keys() & facts[1].keys()
                if changed := [name for name in shared if facts[0][name] != facts[1][name]]:
                    values = [{name: order[name] for name in changed} for order in facts]
                    return Difference(step, 0, "data", *values)
        if then_and_now := _contents(then, now, step):
            return Difference(step, 0, "data", *then_and_now)
        for kind, names in _KINDS:
            for rank in ranks:
                old, new = before[rank].get(step), after[rank].get(step)
                if old is None:  # killed before it was written
                    continue
                if new is None:
                    return Difference(step, rank, "missing", {"row": "written"}, {"row": "none"})
                partial = _began_inside(then, old) or _began_inside(now, new)
                compared = [n for n in names if not (partial and n in _OF_THE_WINDOW)]
                if changed := [name for name in compared if _differs(name, old, new)]:
                    drawn = None
                    if kind in _AFTER_DRAWS:
                        drawn = _other_draws(before[rank], after[rank], step, rank, last)
                    values = [{name: row[name].item() for name in changed} for row in (old, new)]
                    return drawn or Difference(step, rank, kind, *values)
    return None


def _contents(then: Journal, now: Journal, step: int) -> list[dict[str, Any]]:
    """Return the digests of the batch of a step on rank 0, nothing if they are equal or unknown."""
    digests = []
    for journal in (then, now):
        marks = (m for m in journal.marks if (m["kind"], m.get("step")) == ("batch", step))
        digests.append([{"content of the batch": mark["content"]} for mark in marks][-1:])
    before, after = digests
    return [*before, *after] if before and after and before != after else []


def _other_draws(
    before: Mapping[int, Any], after: Mapping[int, Any], step: int, rank: int, last: int
) -> Difference | None:
    """Return that random numbers differ, if the next rows that have the generators say so.

    Most rows do not have them, because they take long to read. What a step draws does not follow
    from its loss, so where they differ a few steps later they are the cause.
    """
    for later in range(step, last + 1):
        old, new = before.get(later), after.get(later)
        if old is not None and new is not None and old["generators"] and new["generators"]:
            if not _differs("generators", old, new):
                return None
            name = f"generators at step {later}"
            values = [{name: row["generators"].item()} for row in (old, new)]
            return Difference(step, rank, "random numbers", *values)
    return None


def _began_inside(journal: Journal, row: Any) -> bool:
    """Return whether a row is of a step inside of whose gradient window its attempt began."""
    attempt = next(part for part in journal.attempts if part.number == row["attempt"])
    start = attempt.start
    return bool(start.get("in_window")) and int(row["step"]) == start.get("step", 0) + 1


def _order(journal: Journal, attempt: int, epoch: int) -> dict[str, Any]:
    """Return what the order of a pass followed from, as it was noted first."""
    for mark in journal.marks:
        if (mark.get("kind"), mark.get("attempt"), mark.get("epoch")) == ("pass", attempt, epoch):
            layout = mark["layout"]
            entries = (layout.get("record") or {}).get("entries") or [[0, {}]]
            # Short, because it is shown: a state of a generator has thousands of bytes.
            drawn = xxh32_hexdigest(json.dumps(entries[0], sort_keys=True).encode())
            names = ("batch_size", "drop_last", "even", "world_size", "sampler")
            facts = {name: layout[name] for name in names if name in layout}
            return {**facts, "generator of the order": drawn}
    return {}


def _rows_by_step(rows: np.ndarray[Any, Any], first: int, last: int) -> dict[int, Any]:
    chosen = rows[(rows["step"] >= first) & (rows["step"] <= last)]
    return {int(row["step"]): row for row in chosen}


def _differs(name: str, old: Any, new: Any) -> bool:
    if name == "generators" and not (old[name] and new[name]):
        return False  # not looked at in both
    return bool(old[name].tobytes() != new[name].tobytes())


def host_generators_differ(then: Journal, now: Journal, first: int, last: int) -> bool:
    """Return whether the generators of Python or NumPy have other states than in the run.

    That alone is no difference: most scripts draw nothing from them, and do not seed them.
    """
    before, after = (
        _rows_by_step(journal.rows(repeated=False), first, last) for journal in (then, now)
    )
    # Few rows have them, and those of a replay may be others.
    pairs = [
        (int(before[step]["host_generators"]), int(after[step]["host_generators"]))
        for step in before.keys() & after.keys()
    ]
    return any(old != new for old, new in pairs if old and new)


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what is not as it was at the start of the run: a line for each fact.

    Args:
        then: mark of the start of the run.
        now: that of the replay.
    """
    lines = []
    for group in ("versions", "git", "numerics", "hardware", "environment", "config", "script"):
        old, new = then.get(group) or {}, now.get(group) or {}
        for name in sorted({*old, *new}):
            before, after = old.get(name, _ABSENT), new.get(name, _ABSENT)
            # A module that one of the two imports later is no change of the script.
            later = group == "script" and _ABSENT in (before, after)
            if before != after and not name.startswith(_EXPECTED) and not later:
                lines.append(f"{group} {name}: {before} -> {after}")
    for name in _OPTIONS:
        if then.get(name) != now.get(name):
            lines.append(f"{name}: {then.get(name)} -> {now.get(name)}")
    return lines


_ABSENT = "(absent)"
_EXPECTED = (REPLAY, "ACCEL_LAUNCH_", "MASTER_PORT", "TORCHELASTIC_")
_OPTIONS = (
    *("world_size", "mixed_precision", "gradient_accumulation_steps"),
    *("distributed_type", "device", "data_world"),
)


class Replay:
    """A replay of one step, in a scratch folder.

    Args:
        journal: of the run; nothing of the run is written to.
        step: the optimizer step, from 1.
        command: to start in place of the recorded one.

    Raises:
        JournalError: the journal has no such step, no command line that can be started, or the run
            can be started neither from a checkpoint before the step nor from its beginning.
    """

    def __init__(self, journal: Journal, step: int, command: str | None = None) -> None:
        self.journal = journal
        self.step = step
        rows = journal.rows()
        chosen = rows[(rows["step"] == step) & ~rows["repeated"]]
        if not len(chosen):
            raise JournalError(f"the journal of {journal.folder} has no step {step}.")
        number = int(chosen["attempt"][0])
        self.attempt = next(part for part in journal.attempts if part.number == number)
        if not self.attempt.start:
            raise JournalError(f"attempt {number} was killed before it said how it was started.")
        self.checkpoint, self.first = _place(journal, rows, step)
        self._command = command

    @property
    def start(self) -> dict[str, Any]:
        """The mark of the start of the attempt that took the step."""
        return self.attempt.start

    def run(self, request: ReplayRequest) -> Journal:
        """Run the script up to the step, and return the journal of that.

        Args:
            request: with its folder; step and checkpoint are filled in.

        Raises:
            JournalError: the script did not come to the step; with the end of its output.
        """
        folder = Path(request.folder)
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / "request.json"
        rollbacks = {
            str(mark["step"]): str(mark["path"])
            for mark in self.journal.marks
            if mark["kind"] == "rollback" and "path" in mark
        }
        request = replace(
            request,
            step=self.step,
            checkpoint=self.checkpoint,
            rollbacks=rollbacks,
            commands=_commands(self.journal),
        )
        request.write(place)
        environment = {**_environment(self.start), REPLAY: str(place)}
        command = self._words()
        cwd = self.start["cwd"]
        if not os.path.isdir(cwd):
            raise JournalError(f"the run was started in {cwd}, which is gone: make it again.")
        if request.stop:
            status = subprocess.run(command, cwd=cwd, env=environment, check=False).returncode
            output = ""
        else:
            done = subprocess.run(
                *(command,),
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            status, output = done.returncode, done.stdout.decode(errors="replace")
        try:
            replayed = Journal.read(folder)
            came = len(replayed.rows()) and int(replayed.rows()["step"].max()) >= self.step
        except JournalError:
            came = False
        if not came:
            raise JournalError(
                f"the replay did not come to step {self.step} (exit code {status} of "
                f"`{shlex.join(command)}`):\n{output[-_LOG_END:]}"
            )
        return replayed

    def _words(self) -> list[str]:
        """Return the command line that runs the script on as many processes as then."""
        recorded = self.start["command"] if self._command is None else shlex.split(self._command)
        if HIDDEN in " ".join(recorded):
            raise JournalError(
                "the command line had a secret, which the journal does not keep: give it with "
                "--command."
            )
        if self._command is not None:
            return list(recorded)
        words = list(recorded[1:])
        if self.attempt.world_size == 1:
            return [sys.executable, *words]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
            words = words[2 if words[0] in ("-X", "-W") else 1 :]
        if Path(words[0]).parts[-2:] == _WORKER:
            words = [*(["-m"] if words[1] == "module" else []), *words[2:]]
        launch = ["-m", "accel_callbacks.cli", "launch"]
        launch += ["--num_processes", str(self.attempt.world_size), "--num_machines", "1"]
        launch += ["--cpu"] if self.start.get("device") == "cpu" else []
        if words[:1] == ["-c"]:
            raise JournalError("a script of `python -c` cannot be launched: give --command.")
        return [sys.executable, *launch, *words]


def _place(journal: Journal, rows: np.ndarray[Any, Any], step: int) -> tuple[str | None, int]:
    """Return the nearest checkpoint before a step, and the first step after it.

    Raises:
        JournalError: there is none, and the run did not begin at its first step.
    """
    kept = {(int(row["attempt"]), int(row["step"])) for row in rows[~rows["repeated"]]}
    best: tuple[int, str] | None = None
    for attempt in journal.attempts:
        for path, saved in _checkpoints(attempt, step):
            counts = (attempt.number, saved) in kept
            if counts and (best is None or saved > best[0]):
                best = saved, path
    if best is not None:
        return best[1], best[0] + 1
    first = journal.attempts[0].start
    if first.get("step") != 0:
        raise JournalError(
            f"no checkpoint before step {step} is left, and the journal does not begin at step 1: "
            "copy a checkpoint of the run back to where it was saved."
        )
    return None, 1


def _commands(journal: Journal) -> list[dict[str, Any]]:
    """Return the marks of commands that changed what the rows hold, in order."""
    commands: list[dict[str, Any]] = []
    for mark in journal.marks:
        # Where a start or a load goes back behind commands, their effects are gone.
        if mark["kind"] == "commands":
            commands = [command for command in commands if command["number"] <= mark["number"]]
        elif mark["kind"] == "control" and "number" in mark:
            commands.append(mark)
    return [command for command in commands if command.get("action") in ("set", "evaluate")]


def _checkpoints(attempt: Attempt, step: int) -> Iterator[tuple[str, int]]:
    """Yield path and step of the checkpoints of an attempt that are still there, before a step."""
    from checkpoint_io import CheckpointError, open_checkpoint

    cwd = attempt.start.get("cwd", ".")
    for path in dict.fromkeys(str(mark["path"]) for mark in attempt.marks_of("save")):
        whole = path if "://" in path else os.path.join(cwd, path)
        try:
            metadata = open_checkpoint(whole).manifest.metadata
        except (CheckpointError, OSError, ValueError):  # removed since
            continue
        saved = metadata.get("step")
        if isinstance(saved, int) and saved < step:
            yield whole, saved


def _environment(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of this process, with those that change what is computed as then."""
    recorded = {
        name: str(value)
        for name, value in (start.get("environment") or {}).items()
        if _is_restored(name)
    }
    hidden = {name for name, value in recorded.items() if value == HIDDEN}
    now = {n: v for n, v in os.environ.items() if n in hidden or not _is_restored(n)}
    return {**now, **{name: recorded[name] for name in recorded.keys() - hidden}}


def _is_restored(name: str) -> bool:
    return name.startswith(_STARTS) and not name.startswith(_OF_A_RANK)
