"""What one rank writes, agreed with the others."""

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
from checkpoint_io.format.tree import TreeEncoder, decode_tree, encode_plain
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.saver.collect import TensorCollector, local_key, pack, shared_key
from checkpoint_io.sharding.local_tensors import Holdings, Replicated, WriteBox
from checkpoint_io.sharding.planner import Assignment, plan_writes
from checkpoint_io.threads import collector_paused

_REMEMBERED = 8
Path = tuple[Any, ...]


class Share(NamedTuple):
    """One rank's share of an assignment."""

    boxes: list[tuple[str, tuple[int, ...]]]
    tied: dict[str, str]


class PlanMemory:
    """The last few assignments, by what this rank and all ranks held."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[str, Share]] = OrderedDict()
        self._lock = threading.Lock()

    def recall(self, own: str) -> tuple[str, Share] | None:
        """Return what all ranks held when this one held `own`, and its share then."""
        with self._lock:
            if own in self._known:
                self._known.move_to_end(own)
            return self._known.get(own)

    def keep(self, own: str, everyone: str, share: Share) -> None:
        """Remember a share."""
        with self._lock:
            self._known[own] = (everyone, share)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)


# A memo of a pure function: what is in it changes how long a save takes, never what it does.
_MEMORY = PlanMemory()


class Proposal:
    """What one rank holds, and what it remembers of having held it before."""

    def __init__(self, holdings: Holdings, rank: int, world_size: int) -> None:
        self._plain = holdings.to_plain()
        self._rank = rank
        text = json.dumps([rank, world_size, self._plain], separators=(",", ":"))
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._recalled = _MEMORY.recall(self.digest)

    def to_plain(self) -> dict[str, Any]:
        """Return the digest for the other ranks."""
        return {"digest": self.digest, "known": self._recalled and self._recalled[0]}

    def settle(self, group: ProcessGroupLike, proposals: Sequence[dict[str, Any]]) -> Share:
        """Return this rank's share; collective, unless all remember the same."""
        everyone = hashlib.sha256("".join(p["digest"] for p in proposals).encode()).hexdigest()
        if self._recalled and all(p["known"] == everyone for p in proposals):
            return self._recalled[1]
        held = group.all_gather_object(self._plain)
        assignment: Assignment = plan_writes(held)
        share = Share(assignment.ranks[self._rank], assignment.tied)
        _MEMORY.keep(self.digest, everyone, share)
        return share


@dataclass
class RankPlan:
    """What one rank writes.

    Attributes:
        files: the boxes of each tensor file, in the order of their bytes.
        tied: keys of tied tensors to the keys under which they are stored, as this rank reports it.
        shared_tree: JSON of the shared state, on rank 0.
        local_tree: JSON of this rank's own state, if it has one.
        metadata: the caller's, taken over.
        problem: what went wrong after the ranks had agreed; to be raised where they meet again.
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
        """Bytes of tensors and trees."""
        trees = len(self.shared_tree or b"") + len(self.local_tree or b"")
        return trees + sum(box.nbytes for boxes in self.files for box in boxes)

    def objects(self, tree: bytes, save_id: str, rank: int | None) -> bytes:
        """Return the bytes of an objects file."""
        head = jsonio.dumps({**self.labels(save_id), "rank": rank}, "an objects file")
        data = head[:-1] + b',"state":' + tree + b"}"
        jsonio.check_size(len(data), "the state's plain values")
        return data

    def labels(self, save_id: str) -> dict[str, str]:
        """Say in each file whose it is, so that a killed save can be cleaned up."""
        labels = {"save_id": save_id}
        return labels if self.run_id is None else {**labels, "run_id": self.run_id}


class Draft:
    """One rank's states, encoded, before the ranks have agreed on who writes what."""

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
        self._holdings = Holdings(shared.tensors, shared.tied, rank, several and replicated)
        self._proposal = (
            Proposal(self._holdings, rank, group.world_size)
            if several or self._holdings.sharded
            else None
        )

    def to_plain(self) -> dict[str, Any]:
        """Return what the other ranks hear first."""
        run_id = self._plan.metadata.get("run_id")
        proposal = {} if self._proposal is None else self._proposal.to_plain()
        return {"run_id": run_id if isinstance(run_id, str) else None, **proposal}

    def settle(self, group: ProcessGroupLike, said: Sequence[dict[str, Any]]) -> RankPlan:
        """Agree with the other ranks and return what this one writes; collective."""
        plan = self._plan
        plan.run_id = said[0]["run_id"]
        tied, chosen = self._tied, []
        if self._proposal is not None:
            share = self._proposal.settle(group, said)
            tied, chosen = share.tied, share.boxes
        try:
            with collector_paused():
                plan.files = self._files(tied, chosen)
            plan.tied = {**(tied if self._rank == 0 else {}), **self._local.tied}
        except BaseException as error:
            plan.problem = error
        return plan

    def _files(
        self, tied: Mapping[str, str], chosen: Sequence[tuple[str, tuple[int, ...]]]
    ) -> list[list[WriteBox]]:
        """Pack what this rank writes into files."""
        boxes = self._holdings.own(tied)
        if chosen:
            boxes += [self._holdings.box(key, offsets) for key, offsets in chosen]
            boxes = self._holdings.in_order(boxes)
        # apart, so that who wants the shared state need not read a rank's own
        return [*self._pack(boxes), *self._pack(self._own())]

    def _own(self) -> list[WriteBox]:
        """Return the tensors of this rank's own state."""
        return [
            WriteBox(key, (0,) * tensor.dim(), tensor, tuple(tensor.shape))
            for key, tensor in self._local.tensors.items()
            if key not in self._local.tied
        ]

    def _pack(self, boxes: list[WriteBox]) -> list[list[WriteBox]]:
        """Split boxes over files; in each, wider types come first, as the format wants it."""
        files = pack([(box.key, box) for box in boxes], self._limit)
        return [
            sorted((box for _, box in file), key=lambda box: -box.tensor.element_size())
            for file in files
        ]


def _encode(state: Mapping[str, Any], root: str, collector: TensorCollector, key_of: Any) -> Any:
    """Encode a state; its tensors go to the collector."""

    def store(path: Path, tensor: torch.Tensor) -> str:
        return collector.add(key_of(path), tensor)

    return TreeEncoder(root, store, sharded=root == "state").encode(dict(state))
