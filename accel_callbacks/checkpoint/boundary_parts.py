"""The parts of a boundary that living ranks of several machines leave, for the restart."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accel_callbacks.checkpoint.async_save import SaveGroup
from accel_callbacks.checkpoint.boundary_records import BoundaryRecord, BoundaryRecords, unpack
from accel_callbacks.checkpoint.boundary_snapshot import merge, save_for_all
from accel_callbacks.checkpoint.peer_copies import of_machines
from accel_callbacks.checkpoint.training_state import labels_of
from accel_callbacks.collectives import tensors_in
from accel_callbacks.logging import notice

__all__ = ["LOST_ROWS", "PART", "ROWS", "join_parts", "name_of"]

LOST_ROWS = "rows of trackers would be lost"
PART = "part"  # the models and optimizers of the ranks of a machine, whole
ROWS = "rows"  # the rows of trackers until here are written
_Key = tuple[str, int]  # an attempt, and the number of a boundary in it


class _Held(NamedTuple):
    """What a machine holds.

    Attributes:
        parts: the boundaries of which it has the whole models and optimizers.
        rows: those until which it has written the rows of trackers.
    """

    parts: list[_Key]
    rows: list[_Key]


def join_parts(
    folder: str, place: Callable[[str, int], str], leads: bool, group: SaveGroup
) -> None:
    """Collective: make the newest boundary that machines hold together a snapshot on one of them.

    Args:
        folder: of this machine, with the records of its ranks, and the parts that they have left.
        place: returns the path of a snapshot, from the name of the attempt and the step.
        leads: this rank speaks for its machine.
        group: the ranks.
    """
    from checkpoint_io import CheckpointError
    from checkpoint_io.group import Outcome, agree

    machines = of_machines(_held_in(Path(folder)) if leads else None, group)
    if not any(machine.parts for machine in machines.values()):
        return
    files = of_machines(BoundaryRecords.packed(Path(folder)) if leads else None, group)
    problem = "what only a lost rank knew is missing, or of an earlier step"
    for key, records in _newest_first(filter(None, map(unpack, itertools.chain(*files.values())))):
        holders = [rank for rank, machine in machines.items() if key in machine.parts]
        if not holders or len(records) < records[0]["world_size"]:
            continue
        logging = [rank for rank, record in records.items() if record["rows"]]
        if logging and not any(key in machine.rows for machine in machines.values()):
            problem = LOST_ROWS
            continue
        own = holders[0] == group.rank
        part, path = Path(folder, name_of(*key), PART), place(key[0], _step(records[0]))
        outcome = Outcome.of(partial(_join, part, path, records) if own else lambda: None)
        try:
            agree(group, outcome, "it could not be written")
        except CheckpointError as error:
            problem = str(error)
        else:
            return
    notice(f"the state of living ranks is passed over: {problem}")


def _held_in(folder: Path) -> _Held:
    from checkpoint_io.format.names import MANIFEST

    parts, rows = [], []
    for path in sorted(folder.glob(name_of("*", "*"))):
        _, attempt, boundary = path.name.split("-")
        if (path / PART / MANIFEST).exists():
            parts.append((attempt, int(boundary)))
        if (path / ROWS).exists():
            rows.append((attempt, int(boundary)))
    return _Held(parts, rows)


def name_of(attempt: str, boundary: int | str) -> str:
    """Return the name of the folder for what ranks leave of a boundary after a loss."""
    return f"loss-{attempt}-{boundary}"


def _newest_first(
    records: Iterable[BoundaryRecord],
) -> list[tuple[_Key, dict[int, Any]]]:
    """Return the records of each boundary by rank, without boundaries that lack that of rank 0."""
    boundaries: dict[_Key, dict[int, Any]] = {}
    for record in records:
        boundaries.setdefault((record.attempt, record.boundary), {})[record.rank] = record.tree
    led = [item for item in boundaries.items() if 0 in item[1]]
    # A boundary of the middle of an epoch and its end may have the same step.
    return sorted(led, key=lambda item: (_step(item[1][0]), item[0][1]), reverse=True)


def _step(record: Mapping[str, Any]) -> int:
    step: int = record["shared"]["run"]["global_step"]
    return step


def _join(part: Path, path: str, records: Mapping[int, Any]) -> None:
    """Save a part and the records of all ranks as a snapshot.

    Raises:
        checkpoint_io.CheckpointError: the part is damaged, or there is no room.
        ValueError: a tensor may have another value on another rank.
    """
    from checkpoint_io import CheckpointError, load

    left = load(str(part)).state
    state = merge(left["sections"], left["replicated"], records[0])
    shutil.rmtree(path, ignore_errors=True)  # of a restart that was lost meanwhile
    nbytes = sum(tensor.nbytes for tensor in tensors_in(state))
    own_states = [records[rank]["local"] for rank in sorted(records)]
    labels = labels_of(records[0]["shared"]["run"])
    problem = save_for_all(path, nbytes, lambda: state, own_states, labels)
    if problem:
        raise CheckpointError(problem)
