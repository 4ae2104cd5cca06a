"""Plan what each rank writes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from checkpoint_io.format import json as jsonio
from checkpoint_io.format.names import parse_size
from checkpoint_io.format.tree import Path, TreeEncoder, decode_tree, encode_plain
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.saver.collect import TensorCollector, local_key, pack, shared_key
from checkpoint_io.sharding.local_tensors import LocalTensors, Replicated, WriteBox
from checkpoint_io.sharding.planner import Assignment, plan_writes
from checkpoint_io.threads import collector_paused

_CACHE_SIZE = 8


class Share(NamedTuple):
    """One rank's share of an assignment."""

    boxes: list[tuple[str, tuple[int, ...]]]
    tied: dict[str, str]


class PlanCache:
    """The last few assignments, by the tensors that the ranks held."""

    def __init__(self) -> None:
        self._shares: OrderedDict[str, tuple[str, Share]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, own: str) -> tuple[str, Share] | None:
        """Return the digest of all ranks for this rank's digest, and this rank's share."""
        with self._lock:
            if own in self._shares:
                self._shares.move_to_end(own)
            return self._shares.get(own)

    def put(self, own: str, everyone: str, share: Share) -> None:
        """Cache a share; drop the least recently used one if there are too many."""
        with self._lock:
            self._shares[own] = (everyone, share)
            while len(self._shares) > _CACHE_SIZE:
                self._shares.popitem(last=False)


# Caches a pure function: it changes how long a save takes, never what it writes.
_CACHE = PlanCache()


class Proposal:
    """The tensors that one rank holds, and the cached share for them."""

    def __init__(self, tensors: LocalTensors, rank: int, world_size: int) -> None:
        self._plain = tensors.to_plain()
        self._rank = rank
        text = json.dumps([rank, world_size, self._plain], separators=(",", ":"))
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._cached = _CACHE.get(self.digest)

    def to_plain(self) -> dict[str, Any]:
        """Return the digest for the other ranks."""
        return {"digest": self.digest, "known": self._cached and self._cached[0]}

    def settle(self, group: ProcessGroupLike, proposals: Sequence[dict[str, Any]]) -> Share:
        """Return this rank's share; collective, unless every rank has it cached."""
        everyone = hashlib.sha256("".join(p["digest"] for p in proposals).encode()).hexdigest()
        # All ranks decide by the same proposals: either none of them enters the collective below,
        # or all do, even those that have a cached share.
        if self._cached and all(p["known"] == everyone for p in proposals):
            return self._cached[1]
        held = group.all_gather_object(self._plain)
        with collector_paused():
            assignment: Assignment = plan_writes(held)
        share = Share(assignment.ranks[self._rank], assignment.tied)
        _CACHE.put(self.digest, everyone, share)
        return share


@dataclass
class RankPlan:
    """The files that one rank writes.

    Attributes:
        files: the boxes of each tensor file, in the order of their bytes.
        tied: keys of tied tensors to the keys under which they are stored, as this rank reports it.
        shared_tree: JSON of the shared state, on rank 0.
        local_tree: JSON of this rank's own state, if it has one.
        metadata: a copy of the caller's metadata.
        run_id: the `run_id` of rank 0's metadata, if it is a string.
        problem: an error after the ranks had agreed; raised in the next step that ends in a gather.
    """

    files: list[list[WriteBox]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    shared_tree: bytes | None = None
    local_tree: bytes | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None
    problem: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of tensors and trees."""
        trees = len(self.shared_tree or b"") + len(self.local_tree or b"")
        return trees + sum(box.nbytes for boxes in self.files for box in boxes)

    def objects(self, tree: bytes, save_id: str, rank: int | None) -> bytes:
        """Return the bytes of an objects file."""
        head = jsonio.dumps({**self.labels(save_id), "rank": rank}, "an objects file")
        data = head[:-1] + b',"state":' + tree + b"}"
        jsonio.check_size(len(data), "the state's plain values")
        return data

    def labels(self, save_id: str) -> dict[str, str]:
        """Return labels for each file; they attribute the files of a killed save to its run."""
        labels = {"save_id": save_id}
        return labels if self.run_id is None else {**labels, "run_id": self.run_id}


class Draft:
    """One rank's encoded states, before the ranks have agreed on an assignment."""

    def __init__(
        self,
        state: Mapping[str, Any],
        local_state: Mapping[str, Any] | None,
        metadata: Mapping[str, Any],
        group: ProcessGroupLike,
        max_shard_size: int | str,
        replicated: Replicated,
    ) -> None:
        rank = self._rank = group.rank
        self._limit = parse_size(max_shard_size)
        plain = encode_plain(dict(metadata), "metadata")
        self._plan = RankPlan(metadata=decode_tree(plain, None, "metadata"))
        shared, local = TensorCollector(), TensorCollector()
        tree = _encode(state, "state", shared, shared_key)
        self._plan.shared_tree = jsonio.dumps(tree, "state") if rank == 0 else None
        if local_state is not None:
            own = _encode(local_state, "local_state", local, lambda path: local_key(rank, path))
            self._plan.local_tree = jsonio.dumps(own, "local_state")
        self._local = local
        self._tied = shared.tied
        several = group.world_size > 1
        self._tensors = LocalTensors(shared.tensors, shared.tied, rank, several and replicated)
        self._proposal = (
            Proposal(self._tensors, rank, group.world_size)
            if several or self._tensors.sharded
            else None
        )

    def to_plain(self) -> dict[str, Any]:
        """Return what the other ranks must know to agree."""
        run_id = self._plan.metadata.get("run_id")
        proposal = {} if self._proposal is None else self._proposal.to_plain()
        return {"run_id": run_id if isinstance(run_id, str) else None, **proposal}

    def settle(self, group: ProcessGroupLike, drafts: Sequence[dict[str, Any]]) -> RankPlan:
        """Agree with the other ranks on an assignment; return this rank's plan. Collective."""
        plan = self._plan
        plan.run_id = drafts[0]["run_id"]
        tied, chosen = self._tied, []
        if self._proposal is not None:
            share = self._proposal.settle(group, drafts)
            tied, chosen = share.tied, share.boxes
        try:
            with collector_paused():
                plan.files = self._files(tied, chosen)
            plan.tied = {**(tied if self._rank == 0 else {}), **self._local.tied}
        except BaseException as error:
            # Raising here, after the last collective, would leave the other ranks to wait in the
            # next one.
            plan.problem = error
        return plan

    def _files(
        self, tied: Mapping[str, str], chosen: Sequence[tuple[str, tuple[int, ...]]]
    ) -> list[list[WriteBox]]:
        """Pack the boxes that this rank writes into files."""
        boxes = self._tensors.rank0_boxes(tied)
        if chosen:
            boxes += [self._tensors.box(key, offsets) for key, offsets in chosen]
            boxes = self._tensors.in_order(boxes)
        # Separate files, so that a reader of the shared state need not read a rank's own.
        return [*self._pack(boxes), *self._pack(self._own())]

    def _own(self) -> list[WriteBox]:
        """Return the tensors of this rank's own state."""
        return [
            WriteBox.all_of(key, tensor)
            for key, tensor in self._local.tensors.items()
            if key not in self._local.tied
        ]

    def _pack(self, boxes: list[WriteBox]) -> list[list[WriteBox]]:
        """Split boxes over files; in each, wider types come first, as in `safetensors.layout`."""
        files = pack([(box.key, box) for box in boxes], self._limit)
        return [
            sorted((box for _, box in file), key=lambda box: -box.tensor.element_size())
            for file in files
        ]


def _encode(state: Mapping[str, Any], root: str, collector: TensorCollector, key_of: Any) -> Any:
    """Encode a state; collect its tensors."""

    def store(path: Path, tensor: torch.Tensor) -> str:
        return collector.add(key_of(path), tensor)

    return TreeEncoder(root, store, sharded=root == "state").encode(dict(state))
