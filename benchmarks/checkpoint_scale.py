"""What the metadata of a checkpoint cost one rank, for a large model sharded over many ranks.

No tensors and no processes: the boxes of Llama-70B with its Adam state under FSDP, as the ranks
would describe them, go through the planner; the manifest that they would write is parsed, listed
and pruned, beside sparse files of the right sizes. Seconds are CPU time of one process.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint_io import CheckpointFolder
from checkpoint_io.format.manifest import PART_SIZE, seal
from checkpoint_io.format.names import MANIFEST, new_save_id, objects_name, tensors_name
from checkpoint_io.format.parse import parse_manifest
from checkpoint_io.saver import commit, plan
from checkpoint_io.saver.save import SaveJob
from checkpoint_io.storage.open import open_store

Box = tuple[tuple[int, ...], tuple[int, ...]]
HEADER = 1 << 16


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the model's parameters, then those of its Adam state."""
    width, inner, narrow, words = 8192, 28672, 1024, 128256
    model: dict[str, tuple[int, ...]] = {"embed_tokens": (words, width), "lm_head": (words, width)}
    for layer in range(layers):
        for name, shape in {
            "q_proj": (width, width),
            "k_proj": (narrow, width),
            "v_proj": (narrow, width),
            "o_proj": (width, width),
            "gate_proj": (inner, width),
            "up_proj": (inner, width),
            "down_proj": (width, inner),
            "input_norm": (width,),
            "post_norm": (width,),
        }.items():
            model[f"layers.{layer}.{name}.weight"] = shape
    model["norm"] = (width,)
    for root in (
        "models/0/{}",
        "optimizers/0/state/{}/exp_avg",
        "optimizers/0/state/{}/exp_avg_sq",
    ):
        for name, shape in model.items():
            yield root.format(name), shape


def shard(shape: tuple[int, ...], rank: int, ranks: int) -> Box:
    """Return the rows of a tensor that FSDP gives to a rank."""
    rows = -(-shape[0] // ranks)
    begin, end = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
    return (begin, *(0,) * (len(shape) - 1)), (end - begin, *shape[1:])


class Held:
    """The tensors of one rank, in place of `LocalTensors`."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self._plain = plain

    def to_plain(self) -> dict[str, Any]:
        return self._plain


class Group:
    """One rank of a group in which all have sent what they hold."""

    rank = 0

    def __init__(self, sent: list[dict[str, Any]]) -> None:
        self.world_size, self._sent = len(sent), sent

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self._sent


def holdings(model: dict[str, tuple[int, ...]], ranks: int) -> list[dict[str, Any]]:
    """Return what each rank says it holds."""
    return [
        {
            "entries": {k: ("F32", s, [shard(s, rank, ranks)]) for k, s in model.items()},
            "tied": {},
        }
        for rank in range(ranks)
    ]


def planned(held: list[dict[str, Any]]) -> None:
    """Plan a first save, as each rank does."""
    plan._CACHE = plan.PlanCache()
    proposal = plan.Proposal(Held(held[0]), 0, len(held))  # type: ignore[arg-type]
    others = [{"digest": str(rank), "known": None} for rank in range(len(held))]
    proposal.settle(Group(held), others)  # type: ignore[arg-type]


def manifest(model: dict[str, tuple[int, ...]], ranks: int, generation: int) -> bytes:
    """Return the manifest that the ranks would commit, with made-up checksums."""
    save_id = new_save_id()
    reports = []
    for rank in range(ranks):
        chunks, at = [], HEADER
        for key, shape in model.items():
            offsets, lengths = shard(shape, rank, ranks)
            size = 4 * math.prod(lengths)
            sums = "00112233445566ff" * -(-size // PART_SIZE)
            if size:
                chunks.append((key, "F32", shape, (0, at, at + size, sums, offsets, lengths)))
            at += size
        files = [_file(tensors_name(save_id, rank, 1), at, "tensors", rank, HEADER)]
        if rank == 0:
            files.append(_file(objects_name(save_id, None), 64, "objects", rank, 64))
        reports.append({"files": files, "chunks": chunks, "tied": {}})
    metadata = {"run_id": "bench", "step": generation}
    return seal(commit._assemble(save_id, generation, metadata, reports))


def _file(name: str, size: int, kind: str, rank: int, covered: int) -> dict[str, Any]:
    sums = ["00112233445566ff"] * -(-covered // PART_SIZE)
    return {
        "name": name,
        "size": size,
        "kind": kind,
        "rank": rank,
        "covered": covered,
        "checksums": sums,
    }


class Told:
    """The group of a rank that is told of the commit."""

    rank, world_size = 1, 2

    def __init__(self, data: bytes) -> None:
        self._verdict = {"state": "committed", "manifest": data}

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self._verdict


def published(data: bytes) -> Any:
    """End a save as a rank other than 0 does."""
    group: Any = Told(data)
    url, files = "memory://checkpoint-scale", plan.RankPlan(limit=1 << 30)
    job = SaveJob(url, open_store(url, {}), files, "0" * 16, group, lambda previous: 1)
    return job._publish([])


def put(folder: Path, data: bytes) -> None:
    """Lay out a checkpoint of sparse files."""
    folder.mkdir()
    for entry in json.loads(data)["files"]:
        with (folder / entry["name"]).open("wb") as file:
            file.truncate(entry["size"])
    (folder / MANIFEST).write_bytes(data)


def seconds(action: Callable[[], Any], rounds: int) -> float:
    """Return the median of the CPU time of some calls."""
    taken = []
    for _ in range(rounds):
        begin = time.process_time()
        action()
        taken.append(time.process_time() - begin)
    return sorted(taken)[len(taken) // 2]


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = dict(shapes(args.layers))
    print(f"{args.ranks} ranks, {len(model)} tensors")

    def show(what: str, action: Callable[[], Any]) -> None:
        print(f"{what:48}{seconds(action, args.rounds):8.3f} s", flush=True)

    held = holdings(model, args.ranks)
    show("plan of a first save, on each rank", partial(planned, held))
    del held
    data = manifest(model, args.ranks, 1)
    print(f"{'manifest':48}{len(data) / 1e6:8.1f} MB")
    show("manifest parsed whole (a load)", lambda: parse_manifest(data, "bench"))
    show("end of a save, on each rank but 0", lambda: published(data))
    place = Path(tempfile.mkdtemp(prefix="checkpoint-scale-"))
    try:
        put(place / "step-00000001", data)
        put(place / "step-00000002", manifest(model, args.ranks, 2))
        show("latest (2 checkpoints)", lambda: CheckpointFolder(place).latest())
        show(
            "prune (2 checkpoints, dry)",
            lambda: CheckpointFolder(place).prune([], run_id="bench", dry_run=True),
        )
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    sys.exit(main())
