"""Averages: keep averages of models' weights, and swap them into the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accel_callbacks.collectives import full_tensor, is_sharded, shard_like
from accel_callbacks.engines.deepspeed.zero_state import RowMesh, ZeroWeight, zero_weight
from accel_callbacks.errors import ResumeError, nearest
from accel_callbacks.gradients import local_part
from accel_callbacks.models.offload.placeholder import AbsentWeight

__all__ = ["Averages", "Rule"]

#: Updates averages (the first list) from the weights (the second) in place; all of one dtype and
#: device, as the functions of torch.optim.swa_utils require.
Rule = Callable[[list[torch.Tensor], list[torch.Tensor]], None]

_CHUNK_ELEMENTS = 2**26  # copied at a time to the dtype and device of the averages
_LOW_PRECISION = (torch.float16, torch.bfloat16)


class Averages:
    """The averages of the floating-point weights of some models.

    Sharded tensors stay sharded, flat parts of ZeRO stage 3 too. Offloaded ones, which are not
    trained, are left out. Averages of half-precision weights are kept in float32, which does not
    round small updates away.

    Args:
        models: as the user built them.
        use_buffers: average the saved floating-point buffers too.
        device: of the averages; that of the weights if ``None``.

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
        self._weights: list[torch.Tensor] = []  # tied ones once
        self._zero: dict[int, ZeroWeight] = {}  # by index: those of which ZeRO keeps flat parts
        self._rows: RowMesh | None = None  # in which these are saved
        self._names: list[str] = []  # "<number of the model>.<first name>" of each weight
        self._offloaded: set[str] = set()  # likewise
        self._aliases: list[tuple[str, str, int]] = []  # model, name, index; all names of each
        self._averages: list[torch.Tensor | None] = []  # None: swapped into the model
        self._displaced: dict[int, torch.Tensor] = {}  # by index: weights swapped out of a model
        for index, model in enumerate(self.models):
            self._register(str(index), model, use_buffers)

    def _register(self, number: str, model: torch.nn.Module, use_buffers: bool) -> None:
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=False))
        if use_buffers:
            saved = model.state_dict(keep_vars=True)
            named += [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in saved]
        indices = {id(tensor): i for i, tensor in enumerate(self._weights)}
        for name, tensor in named:
            if not tensor.is_floating_point() and not tensor.is_complex():
                continue
            if isinstance(tensor, AbsentWeight):
                self._offloaded.add(f"{number}.{name}")
                continue
            if id(tensor) not in indices:
                indices[id(tensor)] = len(self._weights)
                if (flat := zero_weight(tensor)) is not None:
                    self._zero[len(self._weights)] = flat
                self._weights.append(tensor)
                self._names.append(f"{number}.{name}")
            self._aliases.append((number, name, indices[id(tensor)]))

    @property
    def available(self) -> bool:
        """True once there is an average, after the first update or load."""
        return bool(self._averages)

    @property
    def applied(self) -> bool:
        """True while the models hold the averages: all of them or, after an error, some."""
        return bool(self._displaced)

    @torch.no_grad()
    def update(self, rule: Rule, only: Callable[[torch.Tensor], bool] | None = None) -> None:
        """Update the averages from the current weights; the first time, copy them.

        Args:
            rule: updates averages from weights.
            only: selects the weights; all if ``None``.
        """
        self.restore()
        if not self._averages:
            self._averages = [self._new_average(index) for index in range(len(self._weights))]
            return
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        current_weights = list(map(self._live, range(len(self._weights)))) if self._zero else None
        for weight, live, average in zip(
            self._weights, current_weights or self._weights, self._averages, strict=True
        ):
            if average is not None and (only is None or only(weight)):
                source, target = local_part(live), local_part(average)
                kind = (source.device, source.dtype, target.device, target.dtype)
                averaged, current = groups.setdefault(kind, ([], []))
                averaged.append(target)
                current.append(source)
        for averaged, current in groups.values():
            _apply_rule(rule, averaged, current)

    def _live(self, index: int) -> torch.Tensor:
        """Return a weight as it is now: a DTensor, or the flat part that ZeRO keeps of it."""
        return self._zero[index].part() if index in self._zero else self._weights[index].detach()

    def _put(self, index: int, value: torch.Tensor) -> None:
        """Set a weight to a value of the form of :meth:`_live`."""
        if index in self._zero:
            self._zero[index].write(value)
        else:
            _write(self._weights[index], value)

    def _new_average(self, index: int) -> torch.Tensor:
        """Copy a weight in the dtype and to the device of the averages."""
        weight = self._live(index)
        dtype = torch.float32 if weight.dtype in _LOW_PRECISION else weight.dtype
        return weight.to(device=self._device or weight.device, dtype=dtype, copy=True)

    # --- swapping -----------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self) -> None:
        """Put the averages into the models, and keep the weights here until :meth:`restore`.

        This takes the memory of one more tensor, not of one more model, unless the averages are in
        another precision. An error or Ctrl-C on the way restores the weights.
        """
        try:
            for index in range(len(self._weights)):
                average = self._averages[index]
                if index in self._displaced or average is None:
                    continue
                weight = self._live(index)
                # From here on an interrupt loses nothing: restore() takes the weight from here.
                self._displaced[index] = weight.to(average.device, copy=True)
                self._put(index, average)
                if average.dtype == weight.dtype:
                    self._averages[index] = None  # the model holds it, so free this copy
        except BaseException:
            self.restore()
            raise

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back into the models; does nothing if they are there."""
        for index in list(self._displaced):
            if self._averages[index] is None:
                self._averages[index] = self._new_average(index)
            self._put(index, self._displaced[index])
            del self._displaced[index]

    def displaced_weights(self, model: str) -> dict[str, torch.Tensor]:
        """Return the weights of a model, by its number, while it holds the averages.

        Collective under ZeRO stage 3.
        """
        indices = {index: None for number, _, index in self._aliases if number == model}
        saved = {i: self._saved(i, self._displaced[i]) for i in indices if i in self._displaced}
        return {
            name: saved[index]
            for number, name, index in self._aliases
            if number == model and index in saved
        }

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Return the averages by name; empty before the first update.

        Collective under ZeRO stage 3.
        """
        if not self._averages:
            return {}
        return {
            name: self._saved(index, self._live(index) if average is None else average)
            for index, (name, average) in enumerate(zip(self._names, self._averages, strict=True))
        }

    def _saved(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return a value of the form of :meth:`_live` as it is saved: with the weight's shape."""
        if index not in self._zero:
            return value.detach()
        return self._mesh().rows(self._zero[index].whole(value))

    def _mesh(self) -> RowMesh:
        if self._rows is None:
            self._rows = RowMesh(torch.distributed.get_world_size())
        return self._rows

    def _shape(self, index: int) -> tuple[int, ...]:
        whole = self._zero[index] if index in self._zero else self._weights[index]
        return tuple(whole.shape)

    def of_model(self, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved averages of the model with this number, under all names of its weights.

        Args:
            number: of the model.
            state: saved averages, as tensors or as views of a checkpoint.

        Raises:
            ResumeError: they are those of other weights.
        """
        self._check(state)
        names = self._names
        return {name: state[names[i]] for key, name, i in self._aliases if key == str(number)}

    def parts(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return new sharded tensors, for saved averages of sharded weights to be read into.

        Args:
            state: saved averages; those that are views of a checkpoint are considered.

        Returns:
            By name; nothing of averages that do not fit, which :meth:`load` refuses.
        """
        parts = {}
        for index, (name, weight) in enumerate(zip(self._names, self._weights, strict=True)):
            saved = state.get(name)
            if saved is None or isinstance(saved, torch.Tensor):
                continue
            if tuple(saved.shape) != self._shape(index):
                continue
            if index in self._zero:
                parts[name] = self._mesh().empty(saved.shape, saved.dtype)
            elif is_sharded(weight):
                place = self._device or weight.device
                parts[name] = torch.empty_like(weight.detach(), dtype=saved.dtype, device=place)
        return parts

    def _check(self, state: Mapping[str, Any]) -> None:
        for index, name in enumerate(self._names):
            _check_saved(name, self._shape(index), state)
        if unknown := sorted(state.keys() - set(self._names) - self._offloaded):
            hint = nearest(unknown[0], self._names)
            raise ResumeError(f"the average of {unknown[0]!r} is only in the checkpoint.{hint}")

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load saved averages in place.

        Raises:
            ResumeError: they are those of other weights.
        """
        if not state:
            self._averages, self._displaced = [], {}
            return
        self._check(state)
        self._displaced = {}  # a load during an evaluation has restored the weights already
        if not self._averages:
            self._averages = [None] * len(self._weights)
        for index, name in enumerate(self._names):
            target = self._averages[index]
            if target is None:
                target = self._averages[index] = self._new_average(index)
            if index in self._zero:
                whole = full_tensor(state[name])
                target.copy_(self._zero[index].part_of(whole.to(target.device)))
            else:
                _write(target, shard_like(state[name], target))

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module, number: str) -> None:
        """Copy the averages of the model with this number into a model of the same architecture.

        Raises:
            ValueError: the model lacks a weight, or has one of another shape.
        """
        targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = self.state()
        names = [name for name in self._names if name.startswith(f"{number}.")]
        for name in names:
            weight = name.partition(".")[2]
            if weight not in targets or _whole_shape(targets[weight]) != state[name].shape:
                difference = "has no" if weight not in targets else "has another shape of"
                raise ValueError(
                    f"{type(model).__name__} {difference} {weight!r}: copy into a model that is "
                    f"built like the one that was trained.{nearest(weight, targets)}"
                )
        for name in names:
            target, value = targets[name.partition(".")[2]], state[name]
            flat = zero_weight(target)
            if flat is not None:
                whole = full_tensor(value)
                flat.write(flat.part_of(whole.to(target.device)))
            elif is_sharded(value) and not is_sharded(target):
                target.data.copy_(full_tensor(value))
            else:
                _write(target, value)


def _whole_shape(tensor: torch.Tensor) -> torch.Size:
    flat = zero_weight(tensor)
    return tensor.shape if flat is None else flat.shape


def _apply_rule(rule: Rule, averaged: list[torch.Tensor], current: list[torch.Tensor]) -> None:
    """Apply the rule; weights of another dtype or device are converted in chunks."""
    first = averaged[0]
    if (current[0].dtype, current[0].device) == (first.dtype, first.device):
        rule(averaged, current)
        return
    begin, count = 0, 0
    for end, tensor in enumerate(current, start=1):
        count += tensor.numel()
        if count >= _CHUNK_ELEMENTS or end == len(current):
            moved = [tensor.to(first.device, first.dtype) for tensor in current[begin:end]]
            rule(averaged[begin:end], moved)
            begin, count = end, 0


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy through ``.data``, so that autograd's version check passes in a pending backward."""
    local_part(target).data.copy_(local_part(source))


def _check_saved(name: str, shape: tuple[int, ...], state: Mapping[str, Any]) -> None:
    if name not in state:
        raise ResumeError(f"the checkpoint has no average of {name!r}.{nearest(name, state)}")
    if tuple(state[name].shape) != shape:
        raise ResumeError(
            f"{name!r} has shape {shape} in the model and its average "
            f"{tuple(state[name].shape)} in the checkpoint."
        )
