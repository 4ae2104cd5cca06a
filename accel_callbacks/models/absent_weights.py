"""Weights that have memory and no values yet: kept track of, initialized, never computed with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.rng import capture_rng, restore_rng
from accel_callbacks.models.compile import is_compiled, original
from accel_callbacks.terminal_text import listed

__all__ = ["AbsentWeights", "absent_weights", "initialize_weights", "named_tensors"]

Init = Callable[[torch.nn.Module], Any]
_ATTRIBUTE = "_absent_weights"
_INITIALIZE = "initialize_weights"
_FIRST_FORWARD = "the first forward of a model that was built without weights"


def initialize_weights(model: torch.nn.Module, param_init_fn: Init | None = None) -> list[str]:
    """Initialize the weights that a model built on the meta device lacks after ``prepare``.

    Collective. Each module with such weights is initialized as a whole with the random numbers of
    rank 0, and each rank keeps its part: values do not depend on the number of ranks, and from one
    seed they are those of the model built without ``init_empty_weights``, if each module draws when
    it is built. At most one module is whole on a rank. A model that lacks nothing is left alone.

    Args:
        model: a prepared model.
        param_init_fn: initializes the parameters and buffers of the one module that it is given;
            by default its ``reset_parameters``.

    Returns:
        The names of what was initialized.

    Raises:
        ValueError: weights have neither; the message names them, and nothing was changed.
        RemoteError: another rank failed.

    Example:
        >>> import torch
        >>> from accel_callbacks import initialize_weights
        >>> initialize_weights(torch.nn.Linear(1, 1))
        []
    """
    guard = absent_weights(model)
    return [] if guard is None else guard.initialize(guard.names(), param_init_fn)


def absent_weights(model: torch.nn.Module) -> AbsentWeights | None:
    """Return the guard of a model without weights, None if it was built with them."""
    guard: AbsentWeights | None = vars(original(model)).get(_ATTRIBUTE)
    return guard


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, each once; non-persistent buffers too."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


#: The parameters or the buffers of a module, a key in them, and the tensor there.
_Slot = tuple[dict[str, Any], str, torch.Tensor]


class _Absent(NamedTuple):
    """A tensor without values, with its versions when its memory was allocated."""

    tensor: torch.Tensor
    local: torch.Tensor
    version: int
    version_of_local: int


class AbsentWeights:
    """The parameters and buffers of a model that have memory and no values yet.

    A forward pre-hook of the model, a collective, raises on all ranks before anything is computed
    with them, and so do the methods of :meth:`guard`. A write in place by anybody counts as values.

    Args:
        model: a model with tensors on the meta device. They get memory, filled with NaN, and stay
            the same objects, so that optimizers and tied modules keep them.
        device: where their memory is.
        param_init_fn: initializes one module, see :func:`initialize_weights`.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, param_init_fn: Init | None = None
    ) -> None:
        self._model = model
        self._device = device
        self._param_init_fn = param_init_fn
        self._absent = dict(_allocate(model, device))
        hook: Any = self._check
        if is_compiled(model):  # compiled code leaves out what changes no tensor
            hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        # Before those of FSDP, which would gather what is not there.
        self._handle = model.register_forward_pre_hook(hook, prepend=True)
        self._guarded: dict[str, tuple[Any, Any]] = {}  # what the model had itself, and has now
        vars(model)[_ATTRIBUTE] = self

    def guard(self, names: Iterable[str]) -> None:
        """Check before these methods too: they skip the hooks of the model's forward."""
        for name in names:
            if name not in self._guarded:
                before, checked = vars(self._model).get(name), self._wrap_method(name)
                vars(self._model)[name] = checked
                self._guarded[name] = before, checked

    def _wrap_method(self, name: str) -> Callable[..., Any]:
        method = getattr(self._model, name)

        @functools.wraps(method)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check()
            return method(*args, **kwargs)

        return checked

    def _check(self, *hooked: Any) -> None:
        """Raise if weights have no values; otherwise remove the guard."""
        if self._absent:
            with shared_failure(_FIRST_FORWARD):
                self.require()
            self.dismiss()

    def dismiss(self) -> None:
        """Remove the guard from the model, which has all of its values."""
        self._absent.clear()
        self._handle.remove()
        attributes = vars(self._model)
        attributes.pop(_ATTRIBUTE, None)
        for name, (before, checked) in self._guarded.items():
            if attributes.get(name) is checked:
                del attributes[name]
                attributes.update({} if before is None else {name: before})
        self._guarded.clear()

    def require(self) -> None:
        """Raise ValueError if weights have no values."""
        if names := self.names():
            raise ValueError(
                f"{listed(map(repr, names))} of {type(self._model).__name__} {_have(names)} no "
                "values, since it was built on the meta device: load them after prepare(), with "
                "load_checkpoint_in_model(model, path) or accel.load_state(path), or call "
                f"initialize_weights(model).{self._about_buffers(names)}"
            )

    def names(self) -> list[str]:
        """Return the names of the tensors that have not been written to."""
        now = named_tensors(self._model)
        return [name for name, absent in self._absent.items() if _is_absent(now.get(name), absent)]

    def initialize(
        self, names: Iterable[str], param_init_fn: Init | None = None, *, partly: bool = False
    ) -> list[str]:
        """Initialize these of the tensors without values, as :func:`initialize_weights` does.

        Args:
            names: the tensors.
            param_init_fn: initializes one module.
            partly: leave what cannot be initialized without values, in place of an error.

        Returns:
            The names of what was initialized.
        """
        # A rank whose part is empty lacks nothing, and draws the same numbers all the same.
        wanted = {name for lacking in collectives.all_objects(sorted(names)) for name in lacking}
        if not wanted:
            return []
        init = param_init_fn or self._param_init_fn
        with shared_failure(_INITIALIZE):
            prefixes = {name.rpartition(".")[0] for name in wanted}
            modules = [
                (name, module) for name, module in self._model.named_modules() if name in prefixes
            ]
            lost = [
                (name, owner)
                for name, owner in self._owners(wanted)
                if init is None and not callable(getattr(owner, "reset_parameters", None))
            ]
            if lost and not partly:
                self._refuse_without_reset(lost)
            wanted -= {name for name, _ in lost}
        with _random_numbers_of_rank_0(self._device), shared_failure(_INITIALIZE):
            left = [
                name
                for prefix, module in modules
                for name in self._reset(prefix, module, wanted, init)
            ]
            if left and not partly:
                raise ValueError(
                    f"{listed(map(repr, left))} of {type(self._model).__name__} {_have(left)} no "
                    f"values after {'param_init_fn' if init else 'reset_parameters'}, which did "
                    "not write there: load the weights, or initialize all of a module in "
                    f"param_init_fn=.{self._about_buffers(left)}"
                )
        return sorted(wanted.difference(left))

    def _owners(self, wanted: set[str]) -> list[tuple[str, torch.nn.Module]]:
        """Return each of these tensors with its module."""
        return [
            (name, self._model.get_submodule(name.rpartition(".")[0]))
            for name in named_tensors(self._model)
            if name in wanted
        ]

    def _refuse_without_reset(self, lost: Sequence[tuple[str, torch.nn.Module]]) -> NoReturn:
        names = [name for name, _ in lost]
        kinds = sorted({type(owner).__name__ for _, owner in lost})
        raise ValueError(
            f"{listed(map(repr, names))} cannot be initialized: {', '.join(kinds)} has no "
            "reset_parameters. Load the weights with load_checkpoint_in_model(model, path), or "
            "pass initialize_weights(model, param_init_fn), a function that initializes the module "
            f"that it is given.{self._about_buffers(names)}"
        )

    def _reset(
        self, prefix: str, module: torch.nn.Module, wanted: set[str], init: Init | None
    ) -> list[str]:
        """Initialize one module, unsharded; return the wanted tensors that were not written to."""
        targets: list[_Slot] = [
            (slots, key, tensor)
            for slots in _slots_of(module)
            for key, tensor in slots.items()
            if tensor is not None
        ]
        names = [f"{prefix}.{key}" if prefix else key for _, key, _ in targets]
        if wanted.isdisjoint(names):
            return []
        left = []
        with _whole(module, targets, self._device):
            before = [(slots[key], slots[key]._version) for slots, key, _ in targets]
            if init is None:
                module.reset_parameters()  # type: ignore[operator]
            else:
                init(module)
            for (slots, key, target), name, old in zip(targets, names, before, strict=True):
                if name not in wanted:
                    continue
                if _is_written(slots[key], target.shape, *old):
                    collectives.copy_part(target, slots[key].detach())
                else:
                    left.append(name)
        return left

    def _about_buffers(self, names: Iterable[str]) -> str:
        lasting = self._model.state_dict().keys()
        if lost := [name for name in names if name not in lasting]:
            return (
                f" No checkpoint has {listed(map(repr, lost))} (non-persistent): build the "
                "model in init_empty_weights(), which leaves buffers their values, and not in "
                'torch.device("meta").'
            )
        return ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ValueError(
            f"{type(self._model).__name__} has weights without values and cannot be copied: load "
            "or initialize them first."
        )


@torch.no_grad()
def _allocate(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, _Absent]]:
    """Allocate memory for all tensors on the meta device; yield them with their names."""
    slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for owner in _slots_of(module):
            for key, tensor in owner.items():
                if tensor is not None:
                    slots.setdefault(id(tensor), []).append((owner, key))
    for name, tensor in named_tensors(model).items():
        if not tensor.is_meta:
            continue
        memory = torch.empty_like(tensor.detach(), device=device)
        if isinstance(tensor, torch.nn.Parameter):
            fresh = torch.nn.Parameter(memory, requires_grad=tensor.requires_grad)
            vars(fresh).update(vars(tensor))
            torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
        else:
            for owner, key in slots[id(tensor)]:
                owner[key] = memory
            tensor = memory
        local = _local(tensor)
        if local.is_floating_point() or local.is_complex():
            local.fill_(float("nan"))
        yield name, _Absent(tensor, local, tensor._version, local._version)


def _slots_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _is_absent(now: torch.Tensor | None, absent: _Absent) -> bool:
    if now is None or now is not absent.tensor or _local(now).numel() == 0:
        return False
    local = _local(now)
    if now._version != absent.version:
        return False
    if local is absent.local and local._version != absent.version_of_local:
        return False
    # A write through .data counts no version, and FSDP may have moved the part.
    return _is_nan(local)


def _is_written(value: Any, shape: torch.Size, old: torch.Tensor, version: int) -> bool:
    """Return whether a tensor was replaced by values, or written to."""
    if value is None or value.is_meta or value.shape != shape:
        return False
    return value is not old or value._version != version or not _is_nan(value)


def _is_nan(tensor: torch.Tensor) -> bool:
    """Return whether all of a tensor is NaN; an integer tensor cannot be, and counts as NaN."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isnan(tensor.detach()).all())


@contextmanager
def _whole(
    module: torch.nn.Module,
    targets: Sequence[_Slot],
    device: torch.device,
) -> Iterator[None]:
    """Context manager: replace the shards of a module by unsharded tensors."""
    try:
        for slots, key, tensor in targets:
            place = device if tensor.is_meta else _local(tensor).device
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
            if whole.is_floating_point() or whole.is_complex():
                whole.fill_(float("nan"))
            if slots is module._parameters:
                slots[key] = torch.nn.Parameter(whole, requires_grad=tensor.requires_grad)
            else:
                slots[key] = whole
        # Functions written for FSDP1 give memory first, which is there; it would undo the NaN.
        vars(module)["to_empty"] = lambda *args, **kwargs: module
        yield
    finally:
        vars(module).pop("to_empty", None)
        for slots, key, tensor in targets:
            slots[key] = tensor


@contextmanager
def _random_numbers_of_rank_0(device: torch.device) -> Iterator[None]:
    """Context manager: draw the random numbers of rank 0, and restore other generators after it.

    A rank whose generators were those of rank 0 goes on from where it stands, as after building a
    model.
    """
    if collectives.world_size() == 1:
        yield
        return
    with shared_failure(_INITIALIZE):
        state = capture_rng(device)
    first = collectives.broadcast_object(state)
    if state == first:
        yield
        return
    restore_rng(first, device)
    try:
        yield
    finally:
        restore_rng(state, device)


def _have(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"
