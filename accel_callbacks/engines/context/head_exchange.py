"""Sequence parallelism by heads: ranks exchange tokens for heads around attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel_callbacks.engines.context.sequences import ContextParallel
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.plugins.parallelism_handlers import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
)
from accel_callbacks.strategy.base import Sequences
from accel_callbacks.strategy.data_ranks import DataRanks

__all__ = ["HeadExchange", "sequence_parallelism"]


def sequence_parallelism(parallelism: ParallelismConfig, data: DataRanks) -> Sequences:
    """Return the way in which the ranks of a run share sequences.

    Args:
        parallelism: arranges the ranks, with an axis of context or of sequence parallelism.
        data: has the mesh of all ranks, with its axes named.
    """
    if parallelism.cp_enabled:
        options = parallelism.cp_handler or TorchContextParallelConfig()
        return ContextParallel(parallelism.sizes["cp"], options, lambda: data.mesh["cp"])
    heads = parallelism.sp_handler or DeepSpeedSequenceParallelConfig()
    return HeadExchange(parallelism.sizes["sp"], heads, lambda: data.mesh["sp"])


class HeadExchange(ContextParallel):
    """Cuts sequences over ranks, each of which computes attention of all tokens for some heads.

    As DeepSpeed-Ulysses does it. Each rank has one piece of a sequence.

    Args:
        ranks: number of ranks that share a sequence.
        options: the length of sequences, if it does not vary.
        mesh: returns the mesh of one dimension over these ranks.

    Raises:
        ValueError: attention that is not torch's.
    """

    _size = "sp_size"

    def __init__(
        self, ranks: int, options: DeepSpeedSequenceParallelConfig, mesh: Callable[[], Any]
    ) -> None:
        super().__init__(ranks, TorchContextParallelConfig("allgather", load_balance=False), mesh)
        if options.sp_attn_implementation not in (None, "sdpa"):
            raise ValueError(
                f"sp_attn_implementation={options.sp_attn_implementation!r}: ranks exchange heads "
                "around torch.nn.functional.scaled_dot_product_attention, which chooses flash "
                'attention by itself: leave it out, or give "sdpa".'
            )
        self._fixed = None if options.sp_seq_length_is_variable else options.sp_seq_length

    def _check_length(self, buffers: list[torch.Tensor], dims: list[int]) -> int:
        length = super()._check_length(buffers, dims)
        if self._fixed not in (None, length):
            raise ValueError(
                f"sequences have a length of {length}, and sp_seq_length is {self._fixed}: pad "
                "them to it, or leave sp_seq_length_is_variable on."
            )
        return length

    @contextmanager
    def _share_attention(self, buffers: list[torch.Tensor], dims: list[int]) -> Iterator[None]:
        """Context manager: leave each rank its piece of the buffers, and replace attention."""
        rank = self._mesh().get_local_rank()
        for buffer, dim in zip(buffers, dims, strict=True):
            buffer.data = buffer.data.chunk(self._ranks, dim)[rank].contiguous()
        plain = F.scaled_dot_product_attention
        with self._replace_attention(plain, self._by_heads):
            yield

    def _by_heads(
        self, plain: Callable[..., torch.Tensor], *heads: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Compute attention of whole sequences, for this rank's part of the heads."""
        ranks, piece = self._ranks, self._length // self._ranks
        counts = [tensor.shape[-3] for tensor in heads]
        lengths = [tensor.shape[-2] for tensor in heads]
        if any(count % ranks for count in counts):
            raise ValueError(
                f"attention with {counts[0]} heads of queries and {counts[1]} of keys, which "
                f"{ranks} ranks cannot share: choose an sp_size that divides both, or cp_size."
            )
        if set(lengths) != {piece}:
            raise ValueError(
                f"attention got {lengths[0]} queries and {lengths[1]} keys, and each rank has "
                f"{piece} tokens: name what they are made of among the buffers."
            )
        # From (..., heads, tokens / ranks, width) to (..., heads / ranks, tokens, width), and back.
        group = self._mesh().get_group()
        seen = plain(*(_exchange(tensor, group, -3, -2) for tensor in heads), **options)
        return _exchange(seen, group, -2, -3)


class _Exchange(torch.autograd.Function):
    """Cut a tensor along one dimension over the ranks, and join what they have along another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, cut: int, joined: int) -> torch.Tensor:
        ctx.options = group, cut, joined
        # The exchange is by the first dimension: row i goes to rank i.
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # What was cut is joined again, so that it is an exchange too.
        group, cut, joined = ctx.options
        return _exchange(gradients[0], group, joined, cut), None, None, None


def _exchange(tensor: torch.Tensor, group: Any, cut: int, joined: int) -> torch.Tensor:
    result: torch.Tensor = _Exchange.apply(tensor, group, cut, joined)  # type: ignore[no-untyped-call]
    return result
