"""Attention over several ranks on a CPU: torch has its rules for the kernels of GPUs alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import _attention

_aten = torch.ops.aten
_plain = F.scaled_dot_product_attention


class _Ring(torch.autograd.Function):
    """torch's ring over the kernels of the CPU."""

    @staticmethod
    def forward(ctx: Any, query, key, value, is_causal: bool, scale: Any, group: Any):
        out, lse = _attention._templated_ring_attention(
            group,
            2,
            _aten._scaled_dot_product_flash_attention_for_cpu,
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale,
        )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = is_causal, scale, group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any):
        is_causal, scale, group = ctx.options
        ring = inspect.getmodule(_attention._templated_ring_attention)
        query, key, value, out, lse = ctx.saved_tensors
        gradients = ring._templated_ring_attention_backward(
            group,
            2,
            _aten._scaled_dot_product_flash_attention_for_cpu_backward,
            grad_out=gradient.contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=lse,
            is_causal=is_causal,
            dropout_p=0.0,
            scale=scale,
        )
        return (*gradients[:3], None, None, None)


def _attend(
    query: Any, key: Any, value: Any, attn_mask=None, dropout_p=0.0, is_causal=False, **options
):
    """Stand in for ``scaled_dot_product_attention``, below what torch puts around it."""
    if not isinstance(query, DTensor):
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
    mesh, placements = query.device_mesh, query.placements
    parts = [one.to_local() for one in (query, key, value)]
    if torch.is_autocast_enabled("cpu"):  # it would be done above the kernel
        parts = [part.to(torch.get_autocast_dtype("cpu")) for part in parts]
    if options.get("enable_gqa"):
        each = parts[0].shape[1] // parts[1].shape[1]
        parts[1:] = [part.repeat_interleave(each, 1) for part in parts[1:]]
    out = _Ring.apply(*parts, is_causal, options.get("scale"), mesh.get_group())
    return DTensor.from_local(out, mesh, placements, run_check=False)


_attend.__name__ = _plain.__name__  # by which torch replaces it


@contextmanager
def ring_on_cpu() -> Iterator[None]:
    """In the block, contexts of context parallelism work on a CPU."""
    F.scaled_dot_product_attention = _attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _plain
