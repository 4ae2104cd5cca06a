"""What one rank writes in a save: its states as trees, its tensors as boxes packed into files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint_io.format import json as jsonio
from checkpoint_io.format.tree import TreeEncoder, decode_tree, encode_plain
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.layout.sizes import parse_size
from checkpoint_io.pausing import collector_paused
from checkpoint_io.saver.collect import TensorCollector, local_key, pack, shared_key
from checkpoint_io.sharding.local_tensors import Holdings, Replicated, WriteBox
from checkpoint_io.writing.agreement import Proposal

Path = tuple[Any, ...]


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
