"""The connections of the replicas of one quorum: sums over gloo, made again for each quorum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks.distributed.tcp_store import TCPStore, is_loopback, serve_store

__all__ = ["GroupLost", "ReplicaGroup"]

_BUCKET = 32 * 2**20  # bytes that are summed at once


class GroupLost(RuntimeError):
    """A replica of the quorum is gone, or has not answered in time."""


class ReplicaGroup:
    """Sums tensors over the replicas of a quorum; a failure is :class:`GroupLost`.

    Apart from torch's default group, which is that of one replica and outlives the others.

    Args:
        address: of this machine, to listen at.
        timeout: seconds that a replica is waited for.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self._address = address
        self._timeout = timedelta(seconds=timeout)
        self._store: Any = None
        self._group: Any = None
        self._size = 1

    @property
    def store_address(self) -> str:
        """Host and port of the store of this replica, by which others connect if it is first."""
        if self._store is None:
            one_machine = is_loopback(self._address)
            self._store = serve_store(self._address, 0, one_machine=one_machine)
            if self._store is None:
                raise RuntimeError(
                    f"address={self._address!r} is no address of this machine that others can "
                    "reach: give TorchFTKwargs one that is."
                )
        return f"{self._address}:{self._store.port}"

    def connect(self, store: str, prefix: str, place: int, size: int) -> None:
        """Collective: connect the replicas of a quorum.

        Args:
            store: that of the first one.
            prefix: of the keys, new each time.
            place: of this replica among them.
            size: their number.

        Raises:
            GroupLost: one of them did not come.
        """
        self.close()
        self._size = size
        if size == 1:
            return
        host, _, port = store.rpartition(":")
        try:
            client = TCPStore(host, int(port), is_master=False, timeout=self._timeout)
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = self._timeout
            options._devices = [gloo.create_device(hostname=self._address)]
            store_of_quorum: Any = dist.distributed_c10d.PrefixStore(prefix, client)
            self._group = gloo(store_of_quorum, place, size, options)
        except (RuntimeError, ValueError) as error:
            self._group = None
            raise GroupLost(str(error)) from error

    def close(self) -> None:
        """Close the connections, by which the others notice."""
        self._group = None

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Collective: set tensors to their mean over the replicas.

        Raises:
            GroupLost: they were not averaged; their values are undefined.
        """
        if self._size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self._sum(flat)
            flat /= self._size
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def agree(self) -> None:
        """Collective: return once each replica has come here.

        Raises:
            GroupLost: one did not.
        """
        if self._size > 1:
            self._sum(torch.ones(1, device="cpu"))

    def _sum(self, tensor: torch.Tensor) -> None:
        if self._group is None:
            raise GroupLost("the connections are closed")
        try:
            self._group.allreduce([tensor], dist.AllreduceOptions()).wait(self._timeout)
        except RuntimeError as error:
            self.close()
            raise GroupLost(str(error)) from error


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one type that are summed together, in their order."""
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for tensor in tensors:
        apart = bucket and (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)
        if bucket and (apart or nbytes + tensor.nbytes > _BUCKET):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        yield bucket
