"""Plan what each rank writes."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from checkpoint_io.format import json as jsonio
from checkpoint_io.format.tree import TreeEncoder, encode_plain
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.saver.collect import TensorCollector, pack, untied
from checkpoint_io.saver.snapshot import Snapshot
from checkpoint_io.sharding.local_tensors import LocalTensors, Replicated, WriteBox
from checkpoint_io.sharding.planner import Assignment, plan_writes
from checkpoint_io.threads import collector_paused

_CACHE_SIZE = 8
_NOTHING = torch.empty(0, device="cpu")


class Share(NamedTuple):
    """One rank's share of an assignment."""

    boxes: list[tuple[str, tuple[int, ...]]]
    tied: dict[str, str]


class PlanCache:
    """The last few assignments, by the tensors that the ranks held."""

    def __init__(self) -> None:
        self._shares: OrderedDict[str, tuple[str, Share]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> tuple[str, Share] | None:
        """Return the digest of all ranks for this rank's digest, and this rank's share."""
        with self._lock:
            if digest in self._shares:
                self._shares.move_to_end(digest)
            return self._shares.get(digest)

    def put(self, digest: str, everyone: str, share: Share) -> None:
        """Cache a share; drop the least recently used one if there are too many."""
        with self._lock:
            self._shares[digest] = (everyone, share)
            while len(self._shares) > _CACHE_SIZE:
                self._shares.popitem(last=False)


# Caches a pure function: it changes how long a save takes, never what it writes.
_CACHE = PlanCache()


class Proposal:
    """The tensors that one rank holds, and the cached share for them."""

    def __init__(self, tensors: LocalTensors, rank: int, world_size: int) -> None:
        self._tensors = tensors
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
        digests = "".join(proposal["digest"] for proposal in proposals)
        everyone = hashlib.sha256(digests.encode()).hexdigest()
        # All ranks decide by the same proposals: either none of them enters the collective below,
        # or all do, even those that have a cached share.
        if self._cached and all(proposal["known"] == everyone for proposal in proposals):
            return self._cached[1]
        held = group.all_gather_object(self._plain)
        with collector_paused():
            assignment: Assignment = plan_writes(held)
        share = Share(assignment.ranks[self._rank], assignment.tied)
        _CACHE.put(self.digest, everyone, share)
        return share

    def boxes(self, share: Share) -> list[WriteBox]:
        """Return the boxes that this rank writes, in the order of the state."""
        boxes = self._tensors.rank0_boxes(share.tied)
        if share.boxes:
            boxes += [self._tensors.box(key, offsets) for key, offsets in share.boxes]
            boxes = self._tensors.in_order(boxes)
        return boxes


class RankPlan:
    """The files that one rank writes, drafted from its states and settled with the other ranks.

    What can wait is left to the thread that writes: the JSON of the trees, and their division into
    files.

    Args:
        limit: largest tensor file in bytes.

    Attributes:
        tensors: the tensors that this rank writes, those of its own state last.
        run_id: the `run_id` of rank 0's metadata, if it is a string.
        tied: keys of tied tensors to the keys under which they are stored, as this rank reports it.
        metadata: the caller's metadata in its JSON form, after `encode`.
        shared_tree: JSON of the shared state, on rank 0, after `encode`.
        local_tree: JSON of this rank's own state, if it has one, after `encode`.
        problem: an error after the ranks had agreed; raised in the next step that ends in a gather.
    """

    def __init__(self, limit: int) -> None:
        self.tensors: list[torch.Tensor] = []
        self.run_id: str | None = None
        self.tied: dict[str, str] = {}
        self.metadata: dict[str, Any] = {}
        self.shared_tree: bytes | None = None
        self.local_tree: bytes | None = None
        self.problem: BaseException | None = None
        self._limit = limit
        self._keys: list[str] = []
        self._local_count = 0  # how many of the last tensors belong to the local state
        self._boxes: list[WriteBox] = []
        self._snapshots: dict[str, Snapshot] = {}
        self._trees: dict[str, Any] = {}
        self._proposal: Proposal | None = None  # to share out the tensors of the shared state

    def draft(
        self,
        state: Mapping[str, Any],
        local_state: Mapping[str, Any] | None,
        metadata: Mapping[str, Any],
        group: ProcessGroupLike,
        replicated: Replicated,
    ) -> None:
        """Take this rank's states, before the ranks have agreed on an assignment."""
        self.metadata = encode_plain(dict(metadata), "metadata")
        run_id = metadata.get("run_id")
        self.run_id = run_id if isinstance(run_id, str) else None
        several = group.world_size > 1
        # With several ranks the keys are needed now, to agree on who writes what.
        snapshots = None if several else _snapshots(state, local_state)
        if snapshots is None:
            self._draft_encoded(state, local_state, group, several and replicated)
            return
        self._snapshots = snapshots
        self.tensors = [
            tensor for snapshot in snapshots.values() for tensor in snapshot.take_tensors()
        ]

    def _draft_encoded(
        self,
        state: Mapping[str, Any],
        local_state: Mapping[str, Any] | None,
        group: ProcessGroupLike,
        replicated: Replicated,
    ) -> None:
        """Encode both states now."""
        rank = group.rank
        shared, local = TensorCollector(), TensorCollector(rank)
        tree = TreeEncoder("state", shared.add, sharded=True).encode(dict(state))
        self._trees = {"state": tree} if rank == 0 else {}
        if local_state is not None:
            local_tree = TreeEncoder("local_state", local.add).encode(dict(local_state))
            self._trees["local_state"] = local_tree
        if group.world_size > 1 or shared.sharded:
            tensors = LocalTensors(shared.tensors, shared.tied, rank, replicated)
            self._proposal = Proposal(tensors, rank, group.world_size)
            self.tied = local.tied
            self._write_whole({}, untied(local))
        else:
            self.tied = {**shared.tied, **local.tied}
            self._write_whole(untied(shared), untied(local))

    def _write_whole(
        self, shared: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]
    ) -> None:
        """Write these tensors, all of each."""
        self.tensors, self._local_count = [*shared.values(), *local.values()], len(local)
        self._keys = [*shared, *local]

    def to_plain(self) -> dict[str, Any]:
        """Return what the other ranks must know to agree."""
        proposal = {} if self._proposal is None else self._proposal.to_plain()
        return {"run_id": self.run_id, **proposal}

    def settle(self, group: ProcessGroupLike, drafts: Sequence[dict[str, Any]]) -> None:
        """Agree with the other ranks on who writes which boxes; collective."""
        self.run_id = drafts[0]["run_id"]
        # Not kept: it refers to all tensors of the state, also to those of other ranks' files.
        proposal, self._proposal = self._proposal, None
        if proposal is None:
            return
        share = proposal.settle(group, drafts)
        try:
            with collector_paused():
                boxes = proposal.boxes(share)
            self.tensors[:0] = [box.tensor for box in boxes]
            # Without their tensors, which may be replaced, and must not be kept alive then.
            self._boxes = [box._replace(tensor=_NOTHING) for box in boxes]
            self.tied = {**(share.tied if group.rank == 0 else {}), **self.tied}
        except BaseException as error:
            # Raising here, after the last collective, would leave the other ranks to wait in the
            # next one.
            self.problem = error

    def encode(self) -> None:
        """Make the JSON of the trees, once; an error becomes the `problem` of the plan."""
        try:
            with collector_paused():
                self._encode_snapshots()
                trees, self._trees = self._trees, {}
                texts = {root: jsonio.dumps(tree, root) for root, tree in trees.items()}
                self.shared_tree = texts.get("state", self.shared_tree)
                self.local_tree = texts.get("local_state", self.local_tree)
        except BaseException as error:
            self.problem = self.problem or error

    def _encode_snapshots(self) -> None:
        """Encode the snapshots, if that was left to this thread."""
        snapshots, self._snapshots = self._snapshots, {}
        if not snapshots:
            return
        collectors = {"state": TensorCollector(), "local_state": TensorCollector(0)}
        tensors = iter(self.tensors)
        for root, snapshot in snapshots.items():
            copies = list(itertools.islice(tensors, snapshot.count))
            self._trees[root] = snapshot.encode(root, collectors[root], copies)
        shared, local = collectors.values()
        self._write_whole(untied(shared), untied(local))
        self.tied = {**shared.tied, **local.tied}

    def files(self) -> list[list[WriteBox]]:
        """Return the boxes of each tensor file, in the order of their bytes."""
        with collector_paused():
            count = len(self._boxes)
            placed = zip(self._boxes, self.tensors, strict=False)
            boxes = [box._replace(tensor=tensor) for box, tensor in placed]
            whole = zip(self._keys, self.tensors[count:], strict=True)
            boxes += [WriteBox.all_of(key, tensor) for key, tensor in whole]
            middle = len(boxes) - self._local_count
            # Separate files, so that a reader of the shared state need not read a rank's own.
            return [*self._pack(boxes[:middle]), *self._pack(boxes[middle:])]

    def _pack(self, boxes: list[WriteBox]) -> list[list[WriteBox]]:
        """Split boxes over files; in each, wider types come first, as in `safetensors.layout`."""
        files = pack([(box.key, box) for box in boxes], self._limit)
        return [
            sorted((box for _, box in file), key=lambda box: -box.tensor.element_size())
            for file in files
        ]

    @property
    def nbytes(self) -> int:
        """The number of bytes of tensors and trees."""
        self.encode()
        trees = len(self.shared_tree or b"") + len(self.local_tree or b"")
        return trees + sum(tensor.nbytes for tensor in self.tensors)

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


def _snapshots(
    state: Mapping[str, Any], local_state: Mapping[str, Any] | None
) -> dict[str, Snapshot] | None:
    """Take snapshots of the states; return None if one of them must be encoded at once."""
    snapshots: dict[str, Snapshot] = {}
    for root, tree in (("state", state), ("local_state", local_state)):
        if tree is None:
            continue
        snapshot = Snapshot.of(tree)
        if snapshot is None:
            return None
        snapshots[root] = snapshot
    return snapshots
