"""``accel ckpt ls``, ``latest``, ``show``, ``verify``, ``prune`` and ``rm``."""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import checkpoint_io
from accel_callbacks.cli.parser import CommandError
from accel_callbacks.terminal_text import age_of, printable, shape_of, size_of, table, to_json
from checkpoint_io import Manifest
from checkpoint_io.folder import remove_all, remove_checkpoint
from checkpoint_io.format import MANIFEST, save_id_of
from checkpoint_io.loader import manifest_of
from checkpoint_io.local_files import local_path, split_path
from checkpoint_io.storage import Store, open_store
from checkpoint_io.weights import open_weights, sizes_of

_FAILED = {"damaged", "unreachable", "unreadable"}  # statuses of what is not known to be whole
_LABELS = ("step", "run_name", "run_id")  # what save_state writes into the metadata


def run(args: Namespace) -> int:
    """Run one action; print its warnings to standard error."""
    options = storage_options(args.storage_option)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", checkpoint_io.CheckpointWarning)
        try:
            return _ACTIONS[args.action](args, options)
        except BrokenPipeError:
            raise  # from standard output, handled by cli.main
        except CommandError as error:  # may quote a manifest, which others wrote
            raise CommandError(printable(str(error)), error.exit_code) from error
        except (checkpoint_io.CheckpointError, OSError, ImportError, ValueError) as error:
            raise CommandError(printable(str(error)), exit_code=1) from error
        finally:
            for warning in caught:
                if issubclass(warning.category, checkpoint_io.CheckpointWarning):
                    print(printable(f"accel ckpt: {warning.message}"), file=sys.stderr)


def storage_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse ``KEY=VALUE`` pairs; values may be JSON."""
    options: dict[str, Any] = {}
    for number, pair in enumerate(pairs, 1):
        key, equals, value = pair.partition("=")
        if not key or not equals:  # the text is not shown: it may be a password
            raise CommandError(
                f"--storage_option takes KEY=VALUE, such as anon=true, and the one given as number "
                f"{number} has no {'key' if equals else '='}"
            )
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


_Survey = list[tuple[checkpoint_io.CheckpointFolder, list[checkpoint_io.FolderEntry]]]


def _survey(args: Namespace, options: Mapping[str, Any]) -> _Survey:
    """Return the folders with checkpoints, and these, oldest first.

    They are the place and those one level below it, as a project keeps its checkpoints in a
    folder of its own.
    """
    here = checkpoint_io.CheckpointFolder(args.place, storage_options=options)
    entries = here.survey()
    below = [e.path for e in entries if e.status == "foreign" and not e.name.startswith(".")]
    surveyed = [(here, entries)]
    for path in below:
        folder = checkpoint_io.CheckpointFolder(path, storage_options=options)
        surveyed.append((folder, folder.survey()))
    own = [(folder, [e for e in found if e.status != "foreign"]) for folder, found in surveyed]
    return [(folder, sorted(found, key=_age)) for folder, found in own if found]


def _age(entry: checkpoint_io.FolderEntry) -> tuple[int, str]:
    """Return the key that sorts entries, oldest first and those without a manifest before."""
    return (entry.manifest.generation if entry.manifest else -1, entry.name)


def _folder(args: Namespace, options: Mapping[str, Any]) -> checkpoint_io.CheckpointFolder:
    """Open the folder of checkpoints at the place, or the only one that is one level below it."""
    folders = [folder for folder, _ in _survey(args, options)]
    here = checkpoint_io.CheckpointFolder(args.place, storage_options=options)
    if not folders or here.url in [folder.url for folder in folders]:
        return here
    if len(folders) > 1:
        urls = ", ".join(folder.url for folder in folders)
        raise CommandError(f"{args.place} has several folders of checkpoints: name one of {urls}")
    return folders[0]


# --- ls and latest --------------------------------------------------------------------------


def _list(args: Namespace, options: Mapping[str, Any]) -> int:
    """Print a line per checkpoint, the newest of each folder last."""
    entries = [entry for _, entries in _survey(args, options) for entry in entries]
    if args.json:
        print(to_json(list(map(_facts, entries))))
    elif entries:
        root = checkpoint_io.CheckpointFolder(args.place, storage_options=options).url
        rows = [_row(entry, root) for entry in entries]
        print(table(("NAME", "STEP", "RUN", "RUN-ID", "SCORE", "SIZE", "AGE", "STATUS"), rows))
    if not entries:
        is_checkpoint = MANIFEST in sizes_of(open_store(args.place, options))
        hint = f": it is one, `accel ckpt show {args.place}` lists its tensors"
        text = f"no checkpoints in {args.place}{hint if is_checkpoint else ''}"
        print(printable(text), file=sys.stderr)
    return 0 if entries else 1


def _row(entry: checkpoint_io.FolderEntry, root: str) -> tuple[str, ...]:
    """Return the cells of one entry, its name as seen from the folder that was asked for."""
    name = entry.path.removeprefix(root).lstrip(f"/{os.sep}")
    # Of the files only the sizes were looked at: `verify` reads them.
    word = "complete" if entry.status == "valid" else entry.status
    status = f"{word}: {entry.reason}" if entry.reason else word
    if entry.manifest is None:
        return name, "-", "-", "-", "-", "-", "-", status
    manifest = entry.manifest
    step, run, run_id = (str(manifest.metadata.get(key, "-")) for key in _LABELS)
    size, age = size_of(manifest.nbytes), age_of(manifest.created)
    return name, step, run, run_id, _score(manifest), size, age, status


def _score(manifest: Manifest) -> str:
    """Return the monitored metric and its value as text."""
    score = manifest.metadata.get("score")
    if isinstance(score, Mapping) and isinstance(value := score.get("value"), int | float):
        return f"{score.get('monitor')}={value:.6g}"
    return f"{score:.6g}" if isinstance(score, int | float) else "-"


def _facts(entry: checkpoint_io.FolderEntry) -> dict[str, Any]:
    """Return one entry for JSON."""
    facts: dict[str, Any] = {
        "name": entry.name,
        "path": entry.path,
        "status": entry.status,
        "reason": entry.reason,
    }
    if (manifest := entry.manifest) is not None:
        facts |= {
            "id": manifest.id,
            "generation": manifest.generation,
            "created": manifest.created,
            "bytes": manifest.nbytes,
            "world_size": manifest.world_size,
            "metadata": manifest.metadata,
        }
    return facts


def _latest(args: Namespace, options: Mapping[str, Any]) -> int:
    """Print the path of the newest valid checkpoint."""
    newest = _folder(args, options).latest()
    if newest is None:
        print(printable(f"no valid checkpoint in {args.place}"), file=sys.stderr)
        return 1
    if args.json:
        print(
            to_json(
                {"path": newest.path, "name": newest.name, "metadata": newest.manifest.metadata}
            )
        )
    else:
        print(printable(newest.path))
    return 0


# --- show -----------------------------------------------------------------------------------


def _show(args: Namespace, options: Mapping[str, Any]) -> int:
    """Print a line per tensor: name, dtype, shape, and size or the tensor it is tied to."""
    try:
        rows = list(_tensors(args.place, options))
    except checkpoint_io.CheckpointNotFoundError:
        newest = _folder(args, options).latest()
        if newest is None:
            raise
        print(printable(f"{newest.path}, the newest in {args.place}:"), file=sys.stderr)
        rows = list(_tensors(newest.path, options))
    if args.pattern is not None:
        rows = [row for row in rows if fnmatch.fnmatchcase(row["name"], args.pattern)]
    if args.json:
        print(to_json(rows))
        return 0
    lines = ((row["name"], row["dtype"], shape_of(row["shape"]), _size_or_tie(row)) for row in rows)
    if rows:
        print(table(("NAME", "DTYPE", "SHAPE", "SIZE"), lines))
    total = sum(row["bytes"] for row in rows if row["tied_to"] is None)
    print(f"{len(rows)} tensors, {size_of(total)}", file=sys.stderr)
    return 0


def _size_or_tie(row: Mapping[str, Any]) -> str:
    """Return the last column of a tensor's line."""
    return size_of(row["bytes"]) if row["tied_to"] is None else f"-> {row['tied_to']}"


def _tensors(place: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Describe the tensors of a checkpoint, or of model weights in any layout."""
    try:
        manifest = checkpoint_io.read_manifest(place, storage_options=options)
    except (checkpoint_io.CheckpointNotFoundError, NotADirectoryError):
        source = open_weights(place, 0, options)
        tensors = {
            name: (str(info.dtype).removeprefix("torch."), info.shape, info.nbytes)
            for name, info in source.infos.items()
        }
        ties: Mapping[str, str] = source.tied
    else:
        tensors = {
            name: (entry.dtype, entry.shape, sum(c.end - c.begin for c in entry.chunks))
            for name, entry in manifest.tensors.items()
        }
        ties = manifest.aliases
    for name in sorted({*tensors, *ties}):
        dtype, shape, nbytes = tensors[ties.get(name, name)]
        tied_to = ties.get(name)
        yield {
            "name": name,
            "dtype": dtype,
            "shape": list(shape),
            "bytes": nbytes,
            "tied_to": tied_to,
        }


# --- verify ---------------------------------------------------------------------------------


def _verify(args: Namespace, options: Mapping[str, Any]) -> int:
    """Verify a checkpoint, or all of a folder; return 1 unless there is one and all are whole."""
    results = list(_verdicts(args, options))
    if args.json:
        print(to_json(results))
    statuses = {result["status"] for result in results}
    return 0 if "ok" in statuses and not statuses & _FAILED else 1


def _verdicts(args: Namespace, options: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Verify one checkpoint after the other, printing each result at once."""
    paths, known = [args.place], {}
    try:
        checkpoint_io.read_manifest(args.place, tensors=False, storage_options=options)
    except checkpoint_io.CheckpointNotFoundError as error:
        paths = [entry.path for _, entries in _survey(args, options) for entry in entries]
        if not paths:
            raise CommandError(str(error), exit_code=1) from error
    except OSError as error:  # before long requests are tried again
        known = {args.place: _unread(args.place, error)}
    except checkpoint_io.CheckpointError:
        pass  # _verdict reports it
    for path in paths:
        found = known.get(path) or _verdict(path, args.sizes_only, options)
        verdict = {"path": path, **found}
        if not args.json:
            stream = sys.stderr if verdict["status"] in _FAILED else sys.stdout
            reason = f": {verdict['reason']}" if verdict["reason"] else ""
            print(printable(f"{verdict['status']} {path}{reason}"), file=stream)
        yield verdict


def _verdict(path: str, sizes_only: bool, options: Mapping[str, Any]) -> dict[str, str]:
    """Verify one checkpoint."""
    try:
        checkpoint_io.verify(path, full=not sizes_only, storage_options=options)
    except checkpoint_io.CheckpointNotFoundError as error:
        return {"status": "unfinished", "reason": str(error)}
    except OSError as error:
        return _unread(path, error)
    except checkpoint_io.CheckpointError as error:
        return {"status": "damaged", "reason": str(error)}
    return {"status": "ok", "reason": ""}


def _unread(path: str, error: OSError) -> dict[str, str]:
    """Return the verdict about a checkpoint whose files could not be read: it may be whole."""
    status = "unreachable" if local_path(path) is None else "unreadable"
    return {"status": status, "reason": str(error)}


# --- prune ----------------------------------------------------------------------------------


def _prune(args: Namespace, options: Mapping[str, Any]) -> int:
    """Remove checkpoints that no rule keeps, of each chosen run by itself, and print them."""
    rules = []
    if args.keep_last is not None:
        rules.append(checkpoint_io.keep_last(args.keep_last))
    if args.keep_every is not None:
        rules.append(checkpoint_io.keep_every(args.keep_every))
    if args.keep_best is not None:
        rules.append(checkpoint_io.keep_best(args.keep_best, args.metric, args.mode))
    if not rules:
        raise CommandError("give a rule: --keep_last, --keep_every or --keep_best")
    folder = _folder(args, options)
    if not (args.dry_run or args.force):
        _refuse_held(folder.url, options)
    for run_id in _run_ids(args, folder):
        gone = folder.prune(reduce(or_, rules), run_id=run_id, dry_run=args.dry_run)
        for path in gone:
            print(printable(f"{'would remove' if args.dry_run else 'removed'} {path}"))
    return 0


def _run_ids(args: Namespace, folder: checkpoint_io.CheckpointFolder) -> list[str]:
    """Return the ids of the runs that the options name; the only run of the folder by default."""
    runs: dict[str, str] = {}
    for entry in folder.survey():
        metadata = entry.manifest.metadata if entry.manifest else {}
        if isinstance(run_id := metadata.get("run_id"), str):
            runs[run_id] = str(metadata.get("run_name", "-"))
    if args.all_runs:
        return list(runs)
    if args.run_id is not None:
        return [args.run_id]  # even without a checkpoint: of what its killed saves left
    chosen = [run_id for run_id, name in runs.items() if args.run in (None, name)]
    if len(chosen) == 1 or (chosen and args.run is not None):
        return chosen
    listed = ", ".join(f"{name} (--run_id {run_id})" for run_id, name in runs.items()) or "none"
    raise CommandError(
        f"name the run whose checkpoints may be removed, with --run NAME or --run_id ID, or all of "
        f"them with --all_runs. Runs with checkpoints in {folder.url}: {listed}"
    )


def _refuse_held(folder: str, options: Mapping[str, Any]) -> None:
    """Raise CommandError if a run that lives holds the lease of a folder."""
    if folder.endswith("://"):  # of buckets
        return
    try:
        holder = checkpoint_io.Lease(folder, storage_options=options).find_holder()
    except checkpoint_io.LeaseError as error:
        raise CommandError(f"{error}, or add --force; nothing was changed", 1) from error
    if holder is not None:
        raise CommandError(
            f"{folder} is in use by {holder}, which is alive: end that run first, or add --force; "
            "nothing was changed",
            1,
        )


# --- rm ------------------------------------------------------------------------------------


def _remove(args: Namespace, options: Mapping[str, Any]) -> int:
    """Inspect all places, ask once, then remove them."""
    targets = [_inspect(place, options, args.unfinished) for place in dict.fromkeys(args.places)]
    if not args.force:
        for parent in dict.fromkeys(split_path(target.store.url)[0] for target in targets):
            _refuse_held(parent, options)
    for target in targets:
        print(printable(f"to remove: {target.described()}"))
    if not args.yes and not _confirm(len(targets)):
        print("nothing was removed", file=sys.stderr)
        return 1
    for target in targets:
        _remove_place(target)
        print(printable(f"removed {target.place}"))
    return 0


@dataclass(frozen=True)
class _Target:
    """A checkpoint to remove, or (without a manifest) the remains of one."""

    place: str
    store: Store
    manifest: Manifest | None

    def described(self) -> str:
        """Describe the place for the list before removal."""
        if self.manifest is None:
            return f"{self.place} (what is left of a save)"
        step = self.manifest.metadata.get("step", "?")
        return f"{self.place} (step {step}, {size_of(self.manifest.nbytes)})"


def _inspect(place: str, options: Mapping[str, Any], unfinished: bool) -> _Target:
    """Open a place; raise CommandError if it is no checkpoint."""
    store = open_store(place, options)
    try:
        return _Target(place, store, manifest_of(store, tensors=False))
    except checkpoint_io.ManifestVersionError:
        raise
    except checkpoint_io.CheckpointNotFoundError as error:
        if not any(map(save_id_of, store.sizes())):
            raise CommandError(f"{error}; nothing was removed", 1) from error
        reason = f"{place} holds a save that never finished, or is being written right now"
    except checkpoint_io.CorruptCheckpointError as error:
        if not any(map(save_id_of, store.sizes())):
            raise CommandError(f"{error}; it is no checkpoint: nothing was removed", 1) from error
        reason = str(error)
    if not unfinished:
        raise CommandError(f"{reason}; --unfinished removes it; nothing was removed", 1)
    return _Target(place, store, None)


def _confirm(count: int) -> bool:
    """Ask for confirmation to remove."""
    if not sys.stdin.isatty():
        raise CommandError("standard input is no terminal: add --yes; nothing was removed")
    print(f"remove {count} checkpoint{'s' * (count > 1)}? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove_place(target: _Target) -> None:
    """Remove one place, unless it was replaced since it was inspected."""
    store, seen = target.store, target.manifest
    with store.lock():
        if _id_of(store) != (seen.id if seen else None):
            raise CommandError(f"{target.place} was replaced meanwhile: inspect it again", 1)
        if seen is not None:
            remove_checkpoint(store, seen)
        else:
            ours = [name for name in store.sizes() if save_id_of(name)]
            store.remove(MANIFEST)
            remove_all(store, ours)
            for save in {save_id_of(name) or "" for name in ours}:
                store.abort_uploads(save)
            store.remove_folder()
    if rest := sorted(store.sizes()) + store.folders():
        names = ", ".join(rest[:3]) + (", ..." if len(rest) > 3 else "")
        text = f"accel ckpt: {target.place} keeps files that are not of the checkpoint: {names}"
        print(printable(text), file=sys.stderr)


def _id_of(store: Store) -> str | None:
    """Return the id of the checkpoint; None if there is no valid one."""
    try:
        return manifest_of(store, tensors=False).id
    except (checkpoint_io.CheckpointNotFoundError, checkpoint_io.CorruptCheckpointError):
        return None


_ACTIONS: Mapping[str, Callable[[Namespace, Mapping[str, Any]], int]] = {
    "ls": _list,
    "latest": _latest,
    "show": _show,
    "verify": _verify,
    "prune": _prune,
    "rm": _remove,
}
