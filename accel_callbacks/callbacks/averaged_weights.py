"""Averages: keep averages of models' weights, and swap them into the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accel_callbacks.collectives import full_tensor, is_sharded, shard_like
from accel_callbacks.engines.deepspeed.zero_state import RowMesh, zero_weight
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
        self._weights: list[_Weight] = []  # tied ones once
        self._offloaded: set[str] = set()  # "<number of the model>.<name>" of each
        self._rows: RowMesh | None = None  # in which flat parts are saved
        self._started = False
        for index, model in enumerate(self.models):
            self._register(str(index), model, use_buffers)

    def _register(self, number: str, model: torch.nn.Module, use_buffers: bool) -> None:
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=False))
        if use_buffers:
            saved = model.state_dict(keep_vars=True)
            named += [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in saved]
        known = {id(weight.tensor): weight for weight in self._weights}
        for name, tensor in named:
            if not tensor.is_floating_point() and not tensor.is_complex():
                continue
            if isinstance(tensor, AbsentWeight):
                self._offloaded.add(f"{number}.{name}")
                continue
            if id(tensor) not in known:
                known[id(tensor)] = _Weight(tensor, f"{number}.{name}")
                self._weights.append(known[id(tensor)])
            known[id(tensor)].aliases.append((number, name))

    @property
    def available(self) -> bool:
        """True once there is an average, after the first update or load."""
        return self._started

    @property
    def applied(self) -> bool:
        """True while the models hold the averages: all of them or, after an error, some."""
        return any(weight.displaced is not None for weight in self._weights)

    @torch.no_grad()
    def update(self, rule: Rule, only: Callable[[torch.Tensor], bool] | None = None) -> None:
        """Update the averages from the current weights; the first time, copy them.

        Args:
            rule: updates averages from weights.
            only: selects the weights; all if ``None``.
        """
        self.restore()
        if not self._started:
            for weight in self._weights:
                weight.average = weight.copy(self._device)
            self._started = True
            return
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for weight in self._weights:
            if weight.average is not None and (only is None or only(weight.tensor)):
                # Each step comes here: value() would make a new tensor of each weight.
                live = weight.tensor if weight.flat is None else weight.flat.part()
                source, target = local_part(live), local_part(weight.average)
                kind = (source.device, source.dtype, target.device, target.dtype)
                averaged, current = groups.setdefault(kind, ([], []))
                averaged.append(target)
                current.append(source)
        for averaged, current in groups.values():
            _apply_rule(rule, averaged, current)

    # --- swapping -----------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self) -> None:
        """Put the averages into the models, and keep the weights here until :meth:`restore`.

        This takes the memory of one more tensor, not of one more model, unless the averages are in
        another precision. An error or Ctrl-C on the way restores the weights.
        """
        try:
            for weight in self._weights:
                average = weight.average
                if weight.displaced is not None or average is None:
                    continue
                value = weight.value()
                # From here on an interrupt loses nothing: restore() takes the weight from here.
                weight.displaced = value.to(average.device, copy=True)
                weight.write(average)
                if average.dtype == value.dtype:
                    weight.average = None  # the model holds it, so free this copy
        except BaseException:
            self.restore()
            raise

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back into the models; does nothing if they are there."""
        for weight in self._weights:
            if weight.displaced is not None:
                if weight.average is None:
                    weight.average = weight.copy(self._device)
                weight.write(weight.displaced)
                weight.displaced = None

    def displaced_weights(self, model: str) -> dict[str, torch.Tensor]:
        """Return the weights of a model, by its number, while it holds the averages.

        Collective under ZeRO stage 3.
        """
        displaced: dict[str, torch.Tensor] = {}
        for weight in self._weights:
            names = [name for number, name in weight.aliases if number == model]
            if names and weight.displaced is not None:
                displaced |= dict.fromkeys(names, self._whole(weight, weight.displaced))
        return displaced

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Return the averages by name; empty before the first update.

        Collective under ZeRO stage 3.
        """
        if not self._started:
            return {}
        return {
            weight.key: self._whole(
                weight, weight.value() if weight.average is None else weight.average
            )
            for weight in self._weights
        }

    def _whole(self, weight: _Weight, value: torch.Tensor) -> torch.Tensor:
        """Return a value of a weight as it is saved: with the weight's shape."""
        if weight.flat is None:
            return value.detach()
        return self._mesh().rows(weight.flat.whole(value))

    def _mesh(self) -> RowMesh:
        if self._rows is None:
            self._rows = RowMesh(torch.distributed.get_world_size())
        return self._rows

    def of_model(self, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved averages of the model with this number, under all names of its weights.

        Args:
            number: of the model.
            state: saved averages, as tensors or as views of a checkpoint.

        Raises:
            ResumeError: they are those of other weights.
        """
        self._check(state)
        return {
            name: state[weight.key]
            for weight in self._weights
            for key, name in weight.aliases
            if key == str(number)
        }

    def parts(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return new sharded tensors, for saved averages of sharded weights to be read into.

        Args:
            state: saved averages; those that are views of a checkpoint are considered.

        Returns:
            By name; nothing of averages that do not fit, which :meth:`load` refuses.
        """
        parts = {}
        for weight in self._weights:
            saved = state.get(weight.key)
            if saved is None or isinstance(saved, torch.Tensor):
                continue
            if tuple(saved.shape) != weight.shape:
                continue
            if weight.flat is not None:
                parts[weight.key] = self._mesh().empty(saved.shape, saved.dtype)
            elif is_sharded(weight.tensor):
                like, place = weight.value(), self._device or weight.tensor.device
                parts[weight.key] = torch.empty_like(like, dtype=saved.dtype, device=place)
        return parts

    def _check(self, state: Mapping[str, Any]) -> None:
        for weight in self._weights:
            name = weight.key
            if name not in state:
                hint = nearest(name, state)
                raise ResumeError(f"the checkpoint has no average of {name!r}.{hint}")
            if tuple(state[name].shape) != weight.shape:
                raise ResumeError(
                    f"{name!r} has shape {weight.shape} in the model and its average "
                    f"{tuple(state[name].shape)} in the checkpoint."
                )
        names = [weight.key for weight in self._weights]
        if unknown := sorted(state.keys() - set(names) - self._offloaded):
            hint = nearest(unknown[0], names)
            raise ResumeError(f"the average of {unknown[0]!r} is only in the checkpoint.{hint}")

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load saved averages in place.

        Raises:
            ResumeError: they are those of other weights.
        """
        if state:
            self._check(state)
        for weight in self._weights:
            weight.displaced = None  # a load during an evaluation has restored the weights already
            if not state:
                weight.average = None
                continue
            if weight.average is None:
                weight.average = weight.copy(self._device)
            _write(weight.average, weight.part_of(state[weight.key], weight.average))
        self._started = bool(state)

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module, number: str) -> None:
        """Copy the averages of the model with this number into a model of the same architecture.

        Raises:
            ValueError: the model lacks a weight, or has one of another shape.
        """
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        targets = {name: _Weight(tensor, name) for name, tensor in tensors.items()}
        prefix = f"{number}."
        state = {
            name.removeprefix(prefix): value
            for name, value in self.state().items()
            if name.startswith(prefix)
        }
        for name, value in state.items():
            if name not in targets or targets[name].shape != tuple(value.shape):
                difference = "has no" if name not in targets else "has another shape of"
                raise ValueError(
                    f"{type(model).__name__} {difference} {name!r}: copy into a model that is "
                    f"built like the one that was trained.{nearest(name, targets)}"
                )
        for name, value in state.items():
            whole = value if is_sharded(tensors[name]) else full_tensor(value)
            targets[name].write(targets[name].part_of(whole, tensors[name]))


class _Weight:
    """A weight, its average and, while the model holds that, the weight itself.

    This rank keeps each of them in the same form: a tensor, a DTensor, or the flat part of ZeRO
    stage 3.

    Args:
        tensor: the parameter or buffer.
        key: its name in a checkpoint.

    Attributes:
        aliases: number of the model and name, for each of its names; tied weights have several.
        flat: its part under ZeRO stage 3, else None.
        average: None before the first update, and while the model holds it.
        displaced: the weight, while the model holds the average.
    """

    def __init__(self, tensor: torch.Tensor, key: str) -> None:
        self.tensor, self.key = tensor, key
        self.aliases: list[tuple[str, str]] = []
        self.flat = zero_weight(tensor)
        self.average: torch.Tensor | None = None
        self.displaced: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        return tuple(self.tensor.shape if self.flat is None else self.flat.shape)

    def value(self) -> torch.Tensor:
        """Return what the model holds now, in its own memory."""
        return self.tensor.detach() if self.flat is None else self.flat.part()

    def write(self, value: torch.Tensor) -> None:
        """Set what the model holds."""
        if self.flat is None:
            _write(self.tensor, value)
        else:
            self.flat.write(value)

    def copy(self, device: torch.device | None) -> torch.Tensor:
        """Return a copy in the dtype of averages, on a device or where the weight is."""
        value = self.value()
        dtype = torch.float32 if value.dtype in _LOW_PRECISION else value.dtype
        return value.to(device=device or value.device, dtype=dtype, copy=True)

    def part_of(self, saved: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return what this rank keeps of a saved value; collective under ZeRO stage 3."""
        if self.flat is None:
            return shard_like(saved, like)
        return self.flat.part_of(full_tensor(saved).to(like.device))


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
