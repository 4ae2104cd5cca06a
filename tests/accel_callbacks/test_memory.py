"""Giving memory back."""

from __future__ import annotations

import weakref

import torch

from accel_callbacks import clear_device_cache, release_memory


def test_released_names_are_none_and_their_objects_are_gone():
    tensor, circle = torch.ones(3), [torch.zeros(3)]
    circle.append(circle)
    refs = [weakref.ref(tensor), weakref.ref(circle[0])]
    tensor, circle = release_memory(tensor, circle)
    assert (tensor, circle, refs[0]()) == (None, None, None)
    clear_device_cache()
    assert refs[1]() is not None  # not asked to collect
    clear_device_cache(garbage_collection=True)
    assert refs[1]() is None
    assert release_memory() == []
