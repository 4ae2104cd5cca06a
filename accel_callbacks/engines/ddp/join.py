"""torch's Join for uneven inputs: ranks that are done shadow the collectives of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from accel_callbacks import collectives

__all__ = ["join_uneven"]


class _Finish(Joinable):
    """A Joinable that notes if this rank was among the last with inputs."""

    def __init__(self, model: Joinable) -> None:
        super().__init__()
        self._model = model
        self.was_last = True

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _FinishHook(self)

    @property
    def join_device(self) -> torch.device:
        return self._model.join_device

    @property
    def join_process_group(self) -> Any:
        return self._model.join_process_group


class _FinishHook(JoinHook):
    def __init__(self, finish: _Finish) -> None:
        self._finish = finish

    def post_hook(self, is_last_joiner: bool) -> None:
        self._finish.was_last = is_last_joiner


@contextmanager
def join_uneven(
    models: Sequence[Joinable],
    follow: Callable[[Callable[[Any], Any]], None],
    device: torch.device,
) -> Iterator[None]:
    """Context manager: let ranks run out of batches at different times.

    Args:
        models: the models to join; torch broadcasts their final weights to all ranks.
        follow: see ``Gradients.join``.
        device: of this rank.
    """
    if not models:
        yield
        return
    before = [model._join_config for model in models]
    finish = _Finish(models[0])
    join = Join([*models, finish])
    try:
        yield
        with warnings.catch_warnings():  # torch changes the filters of the whole process
            join.__exit__(None, None, None)
    finally:
        # torch leaves joining enabled, and a later forward on a single rank would hang.
        for model, config in zip(models, before, strict=True):
            model._join_config = config
    # Those that took all steps have the same state, and any of them can give it.
    last = collectives.gather(torch.tensor([finish.was_last], device="cpu")).tolist()
    if not all(last):
        newest = max(rank for rank, was_last in enumerate(last) if was_last)
        follow(lambda state: _state_from(newest, state, device))


def _state_from(source: int, state: Any, device: torch.device) -> Any:
    """Collective: return the state of rank ``source``, whose tensors may differ in structure.

    Args:
        source: the rank that sends.
        state: a tree with tensors; ignored on the other ranks.
        device: where the other ranks put tensors that are not on the CPU.
    """
    is_source = collectives.rank() == source
    # The outline first, by which the others know how many tensors come, and their shapes.
    tensors = collectives.tensors_in(state) if is_source else []
    outline = (
        collectives.map_tensors(state, lambda tensor: tensor.to("meta")) if is_source else None
    )
    places = [tensor.device.type == "cpu" for tensor in tensors]
    outline, places = collectives.broadcast_object((outline, places), source)
    if is_source:
        for tensor in tensors:
            collectives.broadcast(tensor, source)
        return state
    on_cpu = iter(places)

    def receive(like: torch.Tensor) -> torch.Tensor:
        place = torch.device("cpu") if next(on_cpu) else device
        return collectives.broadcast(torch.empty_like(like, device=place), source)

    return collectives.map_tensors(outline, receive)
