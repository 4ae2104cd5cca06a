"""A folder of checkpoints: save the newest, load the newest, list, prune."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, Generic, Literal, NoReturn, TypeVar

from checkpoint_io.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    TornLoadError,
)
from checkpoint_io.folder.discovery import CheckpointInfo, FolderEntry, Scanner, age_order
from checkpoint_io.folder.retention import Choose, Pruning, check_mode, ranked
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.group import Outcome, ProcessGroupLike, SingleProcess, describe_failures
from checkpoint_io.loader.lazy import CheckpointReader, open_checkpoint
from checkpoint_io.loader.load import Checkpoint, Request, Steps, load_in_steps, load_request
from checkpoint_io.loader.selection import Only, Rename
from checkpoint_io.local_files import base_name
from checkpoint_io.saver.save import SaveJob, prepare_save
from checkpoint_io.sharding.local_tensors import Replicated
from checkpoint_io.storage.open import child_name, open_store
from checkpoint_io.warning import warn

__all__ = ["CheckpointFolder"]

_MOST_LISTED = 5

T = TypeVar("T")
Paths = Collection[str | os.PathLike[str]]


class CheckpointFolder:
    """Checkpoints side by side, one folder per step: `<url>/step-00000200`.

    "Newest" is the highest generation, a counter that each save sets to 1 + the highest in the
    folder; clocks are not used. Reuse the object: it reads an unchanged manifest only once.

    Args:
        url: the folder: a local path or any fsspec URL; need not exist yet.
        storage_options: passed to the fsspec driver.
        on_warning: called with the text of what would be a `CheckpointWarning`: a checkpoint that
            is skipped, or that cannot be removed. Default: the warning.

    Raises:
        ImportError: the driver for this kind of URL is not installed.

    Example:
        >>> from checkpoint_io import CheckpointFolder, keep_last
        >>> folder = CheckpointFolder("memory://doc-folder/run")
        >>> for step in (100, 200, 300):
        ...     _ = folder.save(step, {"step": step}, metadata={"run_id": "r1"})
        >>> folder.load_latest().state
        {'step': 300}
        >>> len(folder.prune(keep_last(2), run_id="r1"))
        1
        >>> [info.name for info in folder.list()]
        ['step-00000200', 'step-00000300']
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        text = os.fspath(url)
        # "memory://" and "/" are roots, whose slashes belong to them
        slashes = "/" if "://" in text else f"/{os.sep}"
        self.url = text if text.endswith("://") else text.rstrip(slashes) or "/"
        self._options = dict(storage_options or {})
        self._report = on_warning or _warn
        self._store = open_store(text, self._options)
        self._scanner = Scanner(self._store, self._path_of)

    def path(self, step: int) -> str:
        """Return the URL of the checkpoint of a step, which need not exist."""
        if step < 0:
            raise ValueError(f"a step is counted from 0, not {step}")
        return self._path_of(f"step-{step:08d}")

    def _path_of(self, name: str) -> str:
        """Return the URL of a checkpoint from its folder's name."""
        slash = "" if self.url.endswith("/") else "/"
        return f"{self.url}{slash}{child_name(name)}"

    def probe(self) -> None:
        """Write, read back and remove a small file; the error says what to check if that fails."""
        self._store.probe()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        name: str | None = None,
        local_state: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        group: ProcessGroupLike | None = None,
        max_shard_size: int | str = "5GB",
        replicated: Replicated = True,
        progress: bool | None = None,
    ) -> Manifest:
        """Save as the newest checkpoint of this folder; see `checkpoint_io.save`.

        Args:
            step: the training step; names the folder and is added to the metadata.
            state: the shared state.
            name: a folder name other than `step-<step>`, such as "best".
            local_state: the local state of this rank.
            metadata: plain values for the manifest; `step` is added unless given.
            group: the ranks that save together.
            max_shard_size: largest tensor file.
            replicated: which plain tensors are bitwise the same on all ranks.
            progress: a progress bar; None shows one for a long save on a terminal.
        """
        job = self.prepare_save(
            step,
            state,
            name=name,
            local_state=local_state,
            metadata=metadata,
            group=group,
            max_shard_size=max_shard_size,
            replicated=replicated,
        )
        return job.run(group, progress=progress)

    def prepare_save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        name: str | None = None,
        generation: int | None = None,
        local_state: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        group: ProcessGroupLike | None = None,
        max_shard_size: int | str = "5GB",
        replicated: Replicated = True,
        before_write: Callable[[], None] | None = None,
    ) -> SaveJob:
        """Return a job that does the rest of a `save`, now or in the background; collective."""
        # The folder is looked into at the commit, as late as it can be.
        newest = (lambda _: self.next_generation()) if generation is None else generation
        return prepare_save(
            self.path(step) if name is None else self._path_of(name),
            state,
            next_generation=newest,
            local_state=local_state,
            metadata={"step": step, **(metadata or {})},
            group=group,
            max_shard_size=max_shard_size,
            replicated=replicated,
            before_write=before_write,
            storage_options=self._options,
        )

    def load_latest(
        self,
        *,
        rank: int | None = None,
        group: ProcessGroupLike | None = None,
        into: Mapping[Any, Any] | None = None,
        only: Only | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        verify: Literal["parts", "full", "sizes"] = "parts",
        cast: bool = False,
        progress: bool | None = None,
    ) -> Checkpoint:
        """Load the newest checkpoint whose checksums match; warn about each damaged one.

        Args:
            rank: the rank whose `local_state` to load; default: this rank in `group`.
            group: the ranks that must all load the same checkpoint, from a folder that they share:
                if one of them finds it damaged, all fall back together. Default: this process
                alone.
            into: a tree of tensors to load into, as in `load`. Then everything needed from a
                checkpoint is verified before the first tensor is written (`verify` is "full"), each
                byte of it by one rank of `group`.
            only: which tensors, as in `load`.
            rename: other names for them, as in `load`.
            strict: missing or unexpected names are errors.
            verify: how much is verified, as in `load`.
            cast: convert to the dtypes of `into`.
            progress: a progress bar; None shows one for a long load on a terminal.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: none of those that exist can be loaded. It is a TornLoadError
                if `into` has been written to.
            StateMismatchError: the newest one is valid and does not fit `into`.
        """
        group = group or SingleProcess()
        of_rank = group.rank if rank is None else rank

        @cache  # in the first attempt, whose error reaches all ranks
        def request() -> Request:
            how = "full" if into is not None else verify
            shown = False if progress is None and of_rank else progress
            return Request(into, only, rename, strict, how, cast, shown)

        def alone(path: str) -> Checkpoint:
            return load_request(path, of_rank, request(), self._options)

        def together(path: str) -> Steps[Checkpoint]:
            return (yield from load_in_steps(path, of_rank, group.rank, request(), self._options))

        fallback: Fallback[Checkpoint] = Fallback(
            self.url,
            self.survey,
            group,
            in_place=into is not None,
            covers_all=strict,
            report=self._report,
        )
        if group.world_size == 1:
            return fallback.run(alone)
        return fallback.run_in_steps(together)

    def open_latest(
        self,
        *,
        rank: int | None = None,
        group: ProcessGroupLike | None = None,
        skip: Paths = (),
    ) -> CheckpointReader:
        """Open the newest checkpoint whose files all match its manifest (sizes and headers).

        Args:
            rank: the rank whose `local_state` to open; default: this rank in `group`.
            group: the ranks that must all open the same one. Default: this process alone.
            skip: paths to exclude, such as one that turned out to be damaged while it was read.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: none of those that exist can be used.
        """
        group = group or SingleProcess()
        of_rank = group.rank if rank is None else rank

        def attempt(path: str) -> CheckpointReader:
            reader = open_checkpoint(path, rank=of_rank, storage_options=self._options)
            reader.check()
            return reader

        fallback: Fallback[CheckpointReader] = Fallback(
            self.url, self.survey, group, report=self._report
        )
        return fallback.run(attempt, skip=[self._path_of(base_name(path)) for path in skip])

    def list(self) -> builtins.list[CheckpointInfo]:
        """Return all valid checkpoints, oldest first; warn about broken ones.

        Valid means here that the manifest is intact and every file has its size. Checksums are
        verified when a checkpoint is loaded.
        """
        survey = self.survey()
        for entry in survey:
            self._report_skipped(entry)
        return sorted((entry.info for entry in survey if entry.status == "valid"), key=age_order)

    def latest(self) -> CheckpointInfo | None:
        """Return the newest valid checkpoint, None if there is none; warn about newer broken ones.

        Valid is what `list` says. Older checkpoints are not looked into.
        """
        newest = self._scanner.newest(self._report_skipped)
        return None if newest is None else newest.info

    def _report_skipped(self, entry: FolderEntry) -> None:
        """Report a checkpoint that is not valid."""
        if entry.status in ("broken", "unfinished"):
            self._report(f"skipped {entry.name}: {entry.reason}")

    def best(self, metric: str | None = None, mode: str = "min") -> CheckpointInfo | None:
        """Return the best valid checkpoint by a metric, None if none has it; see `keep_best`.

        Args:
            metric: a key of the metadata or the monitor of its `score`; None: any `score`.
            mode: "min" or "max".
        """
        check_mode(mode)
        best_first = ranked(self.list(), metric, mode)
        return best_first[0] if best_first else None

    def survey(self) -> builtins.list[FolderEntry]:
        """Return the status of every folder in this one, with the reason if it is not valid."""
        return self._scanner.survey()

    def names(self) -> builtins.list[str]:
        """Return the names of all folders in this one, sorted; one listing looks into none."""
        return self._store.folders()

    def next_generation(self) -> int:
        """Return 1 + the highest generation in the folder, damaged checkpoints included."""
        return 1 + self._scanner.highest_generation()

    def prune(
        self,
        keep: Paths | str | os.PathLike[str] | Choose,
        *,
        run_id: str,
        protect: Paths = (),
        in_progress: Paths = (),
        dry_run: bool = False,
        missing_ok: bool = False,
    ) -> builtins.list[str]:
        """Remove the checkpoints of a run that are not kept, and the leftovers of its killed saves.

        Call it on one rank, after a save has returned. The newest valid checkpoint of the run is
        never removed, nor is a damaged one that is newer. Checkpoints of other runs are not
        touched, nor are files that this package did not name, except those that
        `metadata["extra_files"]` of a removed checkpoint lists. A checkpoint that a save has locked
        is skipped. Anything that cannot be removed is a warning, and so is a path to keep
        that names nothing here.

        Args:
            keep: a policy such as `keep_last(3) | keep_every(1000)`, which selects from this run's
                valid checkpoints, oldest first; or the paths (or names) to keep. Of a path, its
                last component counts, in any case of its letters.
            run_id: only checkpoints with this `metadata["run_id"]` are considered.
            protect: paths to keep regardless of the policy, such as the one resumed from.
            in_progress: paths that a save is writing to; skipped.
            dry_run: only return what would be removed.
            missing_ok: do not warn about paths to keep that name nothing in this folder.

        Returns:
            The paths of the checkpoints that were removed.
        """
        survey = self.survey()
        names = [entry.name for entry in survey]
        report = _ignore if missing_ok else self._report
        busy = _match_names(in_progress, names, "in_progress", _ignore)
        entries = [entry for entry in survey if entry.name not in busy]
        valid = [entry.info for entry in entries if entry.status == "valid"]
        of_run = [info for info in valid if info.manifest.metadata.get("run_id") == run_id]
        of_run.sort(key=age_order)
        kept = _match_names(protect, names, "protect", report) | {info.name for info in of_run[-1:]}
        kept |= _newer_broken(entries, of_run)
        if callable(keep):
            kept |= {info.name for info in keep(of_run)}
        else:  # a str is itself a collection, of letters
            paths = [keep] if isinstance(keep, (str, os.PathLike)) else keep
            kept |= _match_names(paths, names, "keep", report)
        return Pruning(self._store, run_id, kept, self._report, dry_run).run(entries)


def _newer_broken(
    entries: Sequence[FolderEntry], of_run: Sequence[CheckpointInfo]
) -> builtins.set[str]:
    """Return the names of broken checkpoints that are newer than the run's newest valid one."""
    # kept, because a user may still repair them, for example by copying a file again
    newest = of_run[-1].manifest.generation if of_run else -1
    return {
        entry.name
        for entry in entries
        if entry.status == "broken" and entry.manifest and entry.manifest.generation > newest
    }


def _match_names(
    paths: Paths, names: Sequence[str], option: str, report: Callable[[str], None]
) -> builtins.set[str]:
    """Return the names in a folder that paths stand for; report those that stand for none."""
    matching: set[str] = set()
    for path in paths:
        # APFS and NTFS take names that differ in case for one
        wanted = base_name(path).casefold()
        same = {name for name in names if name.casefold() == wanted}
        if not same:
            listed = ", ".join(names[-_MOST_LISTED:]) or "nothing"
            more = "..., " if len(names) > _MOST_LISTED else ""
            report(
                f"{option}={os.fspath(path)!r} names no checkpoint of this folder, which has "
                f"{more}{listed}: it keeps nothing"
            )
        matching |= same
    return matching


def _ignore(text: str) -> None:
    """Report nothing."""


def _warn(text: str) -> None:
    warn(text, CheckpointWarning)


def _in_one_step(attempt: Callable[[str], T], path: str) -> Steps[T]:
    """Make an attempt that has a single step."""
    return attempt(path)
    yield  # makes this a generator


def _advance(steps: Steps[T], heard: list[Any] | None) -> tuple[bool, Any]:
    """Take a step; return whether it was the last one, and its value."""
    try:
        return False, steps.send(heard)
    except StopIteration as end:
        return True, end.value


class Fallback(Generic[T]):
    """Tries checkpoints from the newest to the oldest until one works on every rank.

    Args:
        url: the folder, for messages.
        survey: scans the folder; called on rank 0 only.
        group: the ranks that must agree.
        in_place: attempts write into the caller's tensors.
        covers_all: each such attempt writes all of them, which repairs what a failed one left.
        report: called with a line for each checkpoint that is skipped.
    """

    def __init__(
        self,
        url: str,
        survey: Callable[[], Sequence[FolderEntry]],
        group: ProcessGroupLike,
        in_place: bool = False,
        covers_all: bool = True,
        report: Callable[[str], None] = _warn,
    ) -> None:
        self._url = url
        self._survey = survey
        self._group = group
        self._report = report
        self._in_place = in_place
        self._covers_all = covers_all
        self._warned: set[str] = set()
        self._broken: list[str] = []
        self._touched = False

    def run(self, attempt: Callable[[str], T], skip: Collection[str] = ()) -> T:
        """Return the result of the first attempt that worked everywhere.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: there are some, and none of them works.
        """
        return self.run_in_steps(lambda path: _in_one_step(attempt, path), skip)

    def run_in_steps(self, attempt: Callable[[str], Steps[T]], skip: Collection[str] = ()) -> T:
        """Do the same with attempts of several steps, each begun if the last one worked everywhere.

        Args:
            attempt: returns a generator. It is sent what all ranks yielded, in rank order; all have
                the same number of steps, and only the last one writes to the caller's tensors.
            skip: paths to exclude.
        """
        tried: list[list[str]] = []
        while (newest := self._next(tried, skip)) is not None:
            tried.append(newest)
            done, value = self._try(newest[0], attempt)
            if done:
                return value  # type: ignore[return-value]
        if self._touched:
            raise TornLoadError(
                f"no checkpoint in {self._url} could be loaded, and an attempt had already written "
                "to the targets: they hold a mixture, load something else into them"
            )
        # not the same as having no checkpoint: a run must not silently restart from scratch
        if tried or self._broken:
            raise CorruptCheckpointError(
                f"no valid checkpoint in {self._url}: all are damaged, as reported for each"
            )
        raise CheckpointNotFoundError(
            f"no valid checkpoint in {self._url}: check the path, or start from scratch"
        )

    def _next(self, tried: Collection[list[str]], skip: Collection[str]) -> list[str] | None:
        """Return path and id of the newest checkpoint not yet tried; the same on all ranks."""
        # Rank 0 scans again for every attempt, since a prune may remove checkpoints meanwhile, and
        # a save may replace one: with its new id it is another one.
        group = self._group
        looked = Outcome.of(lambda: self._look(tried, skip) if group.rank == 0 else (None, []))
        report = looked.to_plain()
        answer = group.broadcast_object((report["value"], report["error"]))
        if answer[1] is not None:
            if looked.error is not None and not isinstance(looked.error, Exception):
                raise looked.error
            raise CheckpointError(f"could not list {self._url}: {answer[1]}") from looked.error
        newest, self._broken = answer[0]
        return None if newest is None else list(newest)

    def _look(
        self, tried: Collection[list[str]], skip: Collection[str]
    ) -> tuple[list[str] | None, list[str]]:
        """Return path and id of the newest one not yet tried, if any, and the broken paths."""
        before = None
        while True:
            entries = self._survey()
            valid, broken = self._sort(entries)
            left = [pair for pair in valid if pair not in tried and pair[0] not in skip]
            # A prune removes what was just listed, because a save has made a newer one: as long as
            # the folder changes, it is too early to say that there is none.
            seen = {(entry.path, entry.status) for entry in entries}
            if left or seen == before:
                return left[-1] if left else None, broken
            before = seen

    def _sort(self, entries: Sequence[FolderEntry]) -> tuple[list[list[str]], list[str]]:
        """Return path and id of the valid checkpoints, oldest first, and the broken paths."""
        for entry in entries:
            if entry.status in ("broken", "unfinished") and entry.path not in self._warned:
                self._warned.add(entry.path)
                self._report(f"skipped {entry.name}: {entry.reason}")
        valid = sorted((e.info for e in entries if e.status == "valid"), key=age_order)
        broken = [e.path for e in entries if e.status == "broken"]
        return [[info.path, info.manifest.id] for info in valid], broken

    def _try(self, path: str, attempt: Callable[[str], Steps[T]]) -> tuple[bool, T | None]:
        """Make an attempt on all ranks; return (False, None) on all if one finds it damaged."""
        steps, heard = attempt(path), None
        while True:
            step = Outcome.of(partial(_advance, steps, heard))
            done, value = step.value or (True, None)
            outcomes = self._report_step(step, done, None if done else value)
            if any(outcome["error"] for outcome in outcomes):
                break
            if done:
                return True, value
            heard = [outcome["value"] for outcome in outcomes]
        steps.close()
        bad = describe_failures(outcomes)
        damaged = outcomes[self._group.rank]["damaged"]
        self._touched |= self._in_place and any(o["torn"] for o in outcomes)
        if any(o["error"] and not o["damaged"] for o in outcomes):
            # not damage but, for example, a network failure: falling back would lose progress
            self._raise_other(path, bad, step.error, damaged)
        if self._touched and not self._covers_all:
            raise TornLoadError(f"loading {path} failed midway: {bad}")
        self._report(f"passed over {path}: {bad}")
        return False, None

    def _report_step(self, step: Outcome, done: bool, value: Any) -> Sequence[Mapping[str, Any]]:
        """Gather how a step went, and whether it has written to the caller's tensors."""
        damaged = isinstance(step.error, (CorruptCheckpointError, CheckpointNotFoundError))
        torn = isinstance(step.error, TornLoadError) or (done and step.error is None)
        report = {**step.to_plain(), "value": value, "damaged": damaged, "torn": torn}
        outcomes: Sequence[Mapping[str, Any]] = self._group.all_gather_object(report)
        return outcomes

    def _raise_other(
        self, path: str, why: str, error: BaseException | None, damaged: bool
    ) -> NoReturn:
        """Raise for an attempt that failed on some rank for a reason other than damage."""
        if error is not None and not isinstance(error, Exception):
            raise error
        if self._touched:  # by this attempt or an earlier one, here or on another rank
            raise TornLoadError(
                f"loading {path} failed after the targets had been written to on some rank: they "
                f"hold a mixture, load something else into them ({why})"
            ) from error
        if error is not None and not damaged:
            raise error
        raise CheckpointError(f"loading {path} failed: {why}") from error
