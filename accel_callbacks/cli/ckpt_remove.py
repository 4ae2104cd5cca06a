"""``accel ckpt rm``: remove checkpoints that are named, and nothing that is none."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import checkpoint_io
from accel_callbacks.cli.parser import CommandError
from accel_callbacks.cli.text import printable, size_of
from checkpoint_io.folder.removal import remove_all, remove_checkpoint
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.names import MANIFEST, save_id_of
from checkpoint_io.loader.files import manifest_of
from checkpoint_io.storage.open import Store, open_store


@dataclass(frozen=True)
class _Doomed:
    """A place that may be removed: a checkpoint, or (without a manifest) what is left of one."""

    place: str
    store: Store
    manifest: Manifest | None

    def described(self) -> str:
        """Say what it is, before it goes."""
        if self.manifest is None:
            return f"{self.place} (what is left of a save)"
        step = self.manifest.metadata.get("step", "?")
        return f"{self.place} (step {step}, {size_of(self.manifest.nbytes)})"


def remove(args: Namespace, options: Mapping[str, Any]) -> int:
    """Look at all places first, ask once, then remove one after the other."""
    doomed = [_look(place, options, args.unfinished) for place in dict.fromkeys(args.places)]
    for one in doomed:
        print(printable(f"{'would remove' if args.dry_run else 'to remove'}: {one.described()}"))
    if args.dry_run:
        return 0
    if not args.yes and not _agreed(len(doomed)):
        print("nothing was removed", file=sys.stderr)
        return 1
    for one in doomed:
        _remove(one)
        print(printable(f"removed {one.place}"))
    return 0


def _look(place: str, options: Mapping[str, Any], unfinished: bool) -> _Doomed:
    """Find out what a place is; a CommandError for what is no checkpoint."""
    store = open_store(place, options)
    try:
        return _Doomed(place, store, manifest_of(store, tensors=False))
    except checkpoint_io.ManifestVersionError:
        raise
    except checkpoint_io.CheckpointNotFoundError as error:
        if not any(map(save_id_of, store.sizes())):
            raise CommandError(f"{error}; nothing was removed{_inside(place, store)}", 1) from error
        reason = f"{place} holds a save that never finished, or is being written right now"
    except checkpoint_io.CorruptCheckpointError as error:
        if not any(map(save_id_of, store.sizes())):
            raise CommandError(f"{error}; it is no checkpoint: nothing was removed", 1) from error
        reason = str(error)
    if not unfinished:
        raise CommandError(f"{reason}; --unfinished removes it; nothing was removed", 1)
    return _Doomed(place, store, None)


def _inside(place: str, store: Store) -> str:
    """Hint at the checkpoints in a folder of them."""
    for name in store.folders():
        if MANIFEST in store.child(name).sizes():
            return f"; it holds checkpoints, such as {place.rstrip('/')}/{name}: name those"
    return ""


def _agreed(count: int) -> bool:
    """Ask whether to remove."""
    if not sys.stdin.isatty():
        raise CommandError("nobody is there to ask: add --yes; nothing was removed")
    print(f"remove {count} checkpoint{'s' * (count > 1)}? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(one: _Doomed) -> None:
    """Remove one place, if it is still what was looked at."""
    store, seen = one.store, one.manifest
    with store.lock():
        if _id_of(store) != (seen.id if seen else None):
            raise CommandError(f"{one.place} was replaced meanwhile: look at it again", 1)
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
        names = printable(", ".join(rest[:3])) + (", ..." if len(rest) > 3 else "")
        print(
            f"accel ckpt: {one.place} keeps what is not of the checkpoint: {names}", file=sys.stderr
        )


def _id_of(store: Store) -> str | None:
    """Return the id of the checkpoint that is there; None if there is no sound one."""
    try:
        return manifest_of(store, tensors=False).id
    except (checkpoint_io.CheckpointNotFoundError, checkpoint_io.CorruptCheckpointError):
        return None
