"""Averages of weights, in the memory beside them, and the exchange of the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accel_callbacks.errors import ResumeError, nearest

__all__ = ["Averages", "Rule", "local_part"]

#: Moves averages (the first list) towards the weights (the second), in place; both are of one
#: dtype and device, as torch.optim.swa_utils wants them.
Rule = Callable[[list[torch.Tensor], list[torch.Tensor]], None]

_COUNTED_TOGETHER = 2**26  # elements of which a copy in another dtype or place is held at a time
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is on this process, in the same memory.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.averaged_weights import local_part
        >>> local_part(torch.ones(1))
        tensor([1.])
    """
    if not hasattr(tensor, "device_mesh"):
        return tensor
    part: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


class Averages:
    """The averages of the floating-point weights of some models.

    Tensors that are spread over processes stay so. Averages of half-precision weights are kept in
    float32, where small steps are not rounded away.

    Args:
        models: as the user built them.
        use_buffers: average the saved floating-point buffers too.
        device: where the averages are kept; where the weights are if ``None``.

    Attributes:
        applied: the models hold the averages now.

    Example:
        >>> import torch
        >>> from torch.optim.swa_utils import get_ema_multi_avg_fn
        >>> from accel_callbacks.callbacks.averaged_weights import Averages
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> averages, ema = Averages([model], use_buffers=True), get_ema_multi_avg_fn(0.5)
        >>> for value in (1.0, 3.0):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     averages.update(lambda averaged, live: ema(averaged, live, None))
        >>> averages.apply()
        >>> model.weight.item()
        2.0
        >>> averages.restore()
        >>> model.weight.item()
        3.0
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        *,
        use_buffers: bool,
        device: torch.device | str | None = None,
    ) -> None:
        self.models = list(models)
        self._device = None if device is None else torch.device(device)
        self._live: list[torch.Tensor] = []
        #: "<number of the model>.<name>" of each, first names only.
        self._names: list[str] = []
        self._aliases: list[tuple[str, str, int]] = []  # all names that tied weights have
        self._averages: list[torch.Tensor | None] = []  # None: the model holds it, while applied
        self._held: dict[int, torch.Tensor] = {}  # the weights that the averages have displaced
        for index, model in enumerate(self.models):
            self._take(str(index), model, use_buffers)

    def _take(self, number: str, model: torch.nn.Module, use_buffers: bool) -> None:
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=False))
        if use_buffers:
            saved = model.state_dict(keep_vars=True)
            named += [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in saved]
        places = {id(tensor): i for i, tensor in enumerate(self._live)}
        for name, tensor in named:
            if not tensor.is_floating_point() and not tensor.is_complex():
                continue
            if id(tensor) not in places:
                places[id(tensor)] = len(self._live)
                self._live.append(tensor)
                self._names.append(f"{number}.{name}")
            self._aliases.append((number, name, places[id(tensor)]))

    @property
    def begun(self) -> bool:
        """Whether there is an average."""
        return bool(self._averages)

    @property
    def applied(self) -> bool:
        """Whether the models hold the averages now, or an exchange has broken off."""
        return bool(self._held)

    @torch.no_grad()
    def update(self, rule: Rule, only: Callable[[torch.Tensor], bool] | None = None) -> None:
        """Take the weights of now into the averages; the first time, copy them.

        Args:
            rule: how.
            only: which of the weights; all if ``None``.
        """
        self.restore()
        if not self._averages:
            self._averages = [self._new(live) for live in self._live]
            return
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for live, average in zip(self._live, self._averages, strict=True):
            if average is not None and (only is None or only(live)):
                here, there = local_part(live), local_part(average)
                kind = (here.device, here.dtype, there.device, there.dtype)
                averaged, current = groups.setdefault(kind, ([], []))
                averaged.append(there)
                current.append(here)
        for averaged, current in groups.values():
            _follow(rule, averaged, current)

    def _new(self, live: torch.Tensor) -> torch.Tensor:
        """A copy of a weight, as averages are kept."""
        dtype = torch.float32 if live.dtype in _LOW_PRECISION else live.dtype
        return live.detach().to(device=self._device or live.device, dtype=dtype, copy=True)

    # --- the exchange -------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self) -> None:
        """Put the averages into the models, and keep the weights here until :meth:`restore`.

        Memory is needed for one more tensor, not for one more model, unless the averages are in
        another precision. An error or Ctrl-C on the way leaves the weights as they were.
        """
        try:
            for place, live in enumerate(self._live):
                average = self._averages[place]
                if place in self._held or average is None:
                    continue
                # From here on the weight is safe in _held, wherever this is interrupted.
                self._held[place] = live.detach().to(average.device, copy=True)
                _write(live, average)
                if average.dtype == live.dtype:
                    self._averages[place] = None  # the model has it now
        except BaseException:
            self.restore()
            raise

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back; does nothing where they are in their place."""
        for place in list(self._held):
            live = self._live[place]
            if self._averages[place] is None:
                self._averages[place] = self._new(live)
            _write(live, self._held[place])
            del self._held[place]

    def weights_of(self, model: str) -> dict[str, torch.Tensor]:
        """While applied: the weights of a model, by its number, that the averages displaced."""
        return {
            name: self._held[place]
            for number, name, place in self._aliases
            if number == model and place in self._held
        }

    # --- out and in ---------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """The averages by name; empty before the first update."""
        if not self._averages:
            return {}
        return {
            name: (live if average is None else average).detach()
            for name, live, average in zip(self._names, self._live, self._averages, strict=True)
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over saved averages, in place.

        Raises:
            ResumeError: they are those of other weights.
        """
        if not state:
            self._averages, self._held = [], {}
            return
        for name, live in zip(self._names, self._live, strict=True):
            _check_saved(name, live, state)
        if unknown := sorted(state.keys() - set(self._names)):
            hint = nearest(unknown[0], self._names)
            raise ResumeError(f"the average of {unknown[0]!r} is only in the checkpoint.{hint}")
        self._held = {}  # whoever loads during an evaluation has loaded the weights too
        if not self._averages:
            self._averages = [None] * len(self._live)
        for place, name in enumerate(self._names):
            target = self._averages[place]
            if target is None:
                target = self._averages[place] = self._new(self._live[place])
            _write(target, _spread_like(target, state[name]))

    @torch.no_grad()
    def write_to(self, model: torch.nn.Module, number: str) -> None:
        """Copy the averages of the model with this number into a model of the same build.

        Raises:
            ValueError: it has no weight of some name, or one of another shape.
        """
        theirs = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = self.state()
        for name in (name for name in self._names if name.startswith(f"{number}.")):
            own = name.partition(".")[2]
            if own not in theirs or theirs[own].shape != state[name].shape:
                what = "has no" if own not in theirs else "has another shape of"
                raise ValueError(
                    f"{type(model).__name__} {what} {own!r}: copy into a model that is built like "
                    f"the one that was trained.{nearest(own, theirs)}"
                )
        for name in (name for name in self._names if name.startswith(f"{number}.")):
            _write(theirs[name.partition(".")[2]], state[name])


def _follow(rule: Rule, averaged: list[torch.Tensor], current: list[torch.Tensor]) -> None:
    """Apply the rule; weights of another dtype or place are brought over a part at a time."""
    first = averaged[0]
    if (current[0].dtype, current[0].device) == (first.dtype, first.device):
        rule(averaged, current)
        return
    begin, count = 0, 0
    for end, tensor in enumerate(current, start=1):
        count += tensor.numel()
        if count >= _COUNTED_TOGETHER or end == len(current):
            moved = [one.to(first.device, first.dtype) for one in current[begin:end]]
            rule(averaged[begin:end], moved)
            begin, count = end, 0


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the content; `.data`, so that a backward that is still to come does not object."""
    local_part(target).data.copy_(local_part(source))


def _check_saved(name: str, live: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
    if name not in state:
        raise ResumeError(f"the checkpoint has no average of {name!r}.{nearest(name, state)}")
    if tuple(state[name].shape) != tuple(live.shape):
        raise ResumeError(
            f"{name!r} has shape {tuple(live.shape)} in the model and its average "
            f"{tuple(state[name].shape)} in the checkpoint."
        )


def _spread_like(target: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """A saved tensor, spread over the processes as the target is."""
    if not hasattr(target, "device_mesh") or hasattr(saved, "device_mesh"):
        return saved
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = target.device_mesh
    moved = saved.to(local_part(target).device)
    return distribute_tensor(moved, mesh, target.placements)  # type: ignore[attr-defined]
