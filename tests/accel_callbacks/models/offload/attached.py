"""The language model of the adapters' tests on the engine itself: which weights are where."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from accel_callbacks.models.offload.residence import Offload, OffloadOptions, attach
from accel_callbacks.models.offload.source import StoredWeights
from accel_callbacks.models.offload.units import blocks_of, cut_units

CPU = torch.device("cpu")


def attached(
    model: Any,
    folder: Any,
    *,
    offloaded: Iterable[str] = ("",),
    held: Iterable[str] = (),
    device: torch.device = CPU,
    **options: Any,
) -> tuple[Any, Offload]:
    """Return a copy of a model whose weights with these prefixes are offloaded, or held."""
    options.setdefault("direct", False)
    made = copy.deepcopy(model).requires_grad_(False)
    units = cut_units(made, lambda name: name.startswith(tuple(offloaded)), blocks_of(made))
    kept = {
        name: tensor.detach().clone()
        for name, tensor in (*made.named_parameters(), *made.named_buffers())
        if name.startswith(tuple(held))
    }
    stored = StoredWeights.of_checkpoint(folder)
    offload = Offload(units, device, stored, kept, OffloadOptions(**options))
    attach(made, offload, units)
    return made, offload
