"""Objects and hooks that users register for save_state and load_state."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accel_callbacks.checkpoint.part import CheckpointPart, Load, Sections
from accel_callbacks.collectives import map_tensors
from accel_callbacks.errors import ResumeError
from checkpoint_io.warning import warn

__all__ = ["PreHooks", "Registered", "RegisteredPart"]

Hook = Callable[..., Any]


class PreHooks:
    """The hooks before ``save_state`` and ``load_state``, in the order of registration."""

    def __init__(self) -> None:
        self._before_save: OrderedDict[int, Hook] = OrderedDict()
        self._before_load: OrderedDict[int, Hook] = OrderedDict()

    def on_save(self, hook: Hook) -> RemovableHandle:
        """Add ``hook(models, weights, output_dir)``."""
        return _add(self._before_save, hook, "hook(models, weights, output_dir)")

    def on_load(self, hook: Hook) -> RemovableHandle:
        """Add ``hook(models, input_dir)``."""
        return _add(self._before_load, hook, "hook(models, input_dir)")

    @property
    def save_some(self) -> bool:
        """True if there is a save hook."""
        return bool(self._before_save)

    @property
    def load_some(self) -> bool:
        """True if there is a load hook."""
        return bool(self._before_load)

    def save(
        self, models: Iterable[torch.nn.Module], weights: Iterable[Any], output_dir: str
    ) -> list[Any]:
        """Call the hooks; return the weights that they left of each model, None for removed ones.

        Raises:
            ValueError: a hook removed weights and added others, so that their models are unknown.
        """
        models, weights = list(models), list(weights)
        owners = list(range(len(models)))  # owners[i]: whose weights weights[i] are
        left = list(models)
        result: list[Any] = list(weights)
        for hook in list(self._before_save.values()):
            before = list(weights)
            hook(left, weights, output_dir)
            owners = _owners_after(hook, owners, before, weights)
        for index in range(len(models)):
            kept = index in owners and any(model is models[index] for model in left)
            result[index] = weights[owners.index(index)] if kept else None
        return result

    def load(self, models: Iterable[Any], input_dir: str) -> list[Any]:
        """Call the hooks; return the models that they left, which are still to be loaded."""
        left = list(models)
        for hook in list(self._before_load.values()):
            hook(left, input_dir)
        return left


def _add(hooks: OrderedDict[int, Hook], hook: Hook, form: str) -> RemovableHandle:
    if not callable(hook):
        raise TypeError(f"{hook!r} cannot be called: pass a function {form}.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _owners_after(hook: Hook, owners: list[int], before: list[Any], after: list[Any]) -> list[int]:
    """Return the model index of each weight that is left, by identity, or by place if all are."""
    known = {id(weight): owner for weight, owner in zip(before, owners, strict=True)}
    if any(id(weight) not in known for weight in after):
        if len(after) == len(before):
            return owners
        name = getattr(hook, "__qualname__", repr(hook))
        raise ValueError(
            f"the save hook {name} left {len(after)} of {len(before)} weights, some of them new: "
            "edit or replace them in their place, or take out what the hook saves itself."
        )
    return [known[id(weight)] for weight in after]


class Registered:
    """User objects that are saved by their ``state_dict``, with the training state."""

    def __init__(self) -> None:
        self.clear()

    @property
    def objects(self) -> list[Any]:
        """The objects, in the order of their registration."""
        return list(self._objects.values())

    @property
    def names(self) -> list[str]:
        """The names of the saved states."""
        return list(self._objects)

    def __contains__(self, obj: Any) -> bool:
        return self._name_of(obj) is not None

    def add(self, *objects: Any, **named: Any) -> None:
        """Register objects once each; those without a name get the name of their class.

        Raises:
            ValueError: an object lacks ``state_dict`` or ``load_state_dict``, or a name is taken.
        """
        _check([*((f"Item at index {i}", obj) for i, obj in enumerate(objects)), *named.items()])
        for name, obj in named.items():
            self._add_named(name, obj)
        for obj in objects:
            if self._name_of(obj) is None:
                name = self._free_name(type(obj).__qualname__)
                self._unnamed.append(name)
                self._put(name, obj)

    def clear(self) -> None:
        """Forget all objects, and states that were loaded for objects not registered."""
        self._objects: dict[str, Any] = {}
        self._unnamed: list[str] = []
        self._unclaimed: dict[str, Any] = {}
        self._unclaimed_unnamed: list[str] = []
        self._undo: list[Callable[[], Any]] | None = None

    def _add_named(self, name: str, obj: Any) -> None:
        known = self._name_of(obj)
        if known == name and known not in self._unnamed:
            return
        if known is not None and known not in self._unnamed:
            raise ValueError(f"{_show(obj)} is registered as {known!r} already: use one name.")
        if known is not None:
            self._unnamed.remove(known)
            del self._objects[known]
        if name in self._objects:
            other = _show(self._objects[name])
            raise ValueError(
                f"{name!r} is taken by {other}: register {_show(obj)} by another name."
            )
        self._put(name, obj)

    def _put(self, name: str, obj: Any) -> None:
        self._objects[name] = obj
        if name in self._unclaimed:
            warn(
                f"the checkpoint that was loaded holds a state of {name!r}, which is not restored: "
                "register objects before load_state() and run().",
            )

    def _name_of(self, obj: Any) -> str | None:
        return next((name for name, known in self._objects.items() if known is obj), None)

    def _free_name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._objects:
            number += 1
            name = f"{wanted}-{number}"
        return name

    # --- saving and loading -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each object by name, with loaded states of objects not registered."""
        kept = [name for name in self._unclaimed_unnamed if name not in self._objects]
        return {
            "objects": {
                **self._unclaimed,
                **{name: obj.state_dict() for name, obj in self._objects.items()},
            },
            "unnamed": [*self._unnamed, *kept],
        }

    def load_state_dict(
        self,
        saved: Mapping[str, Any],
        *,
        strict: bool = False,
        chosen: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Restore each object by name, or by position if its class was renamed.

        Args:
            saved: from :meth:`state_dict`.
            strict: raise where an object finds no state of its own, instead of warning.
            chosen: returns whether the object of a name is restored.

        Raises:
            ResumeError: ``strict``, and an object is missing in ``saved`` or found by position.
        """
        states = dict(saved["objects"])
        sources = {name: name for name in self._objects if name in states}
        for name, source in self._by_position(saved).items():
            _doubt(
                f"{name!r} is not in the checkpoint and gets the state of {source!r}, which has "
                "its place there; register_for_checkpointing(name=object) keeps them apart",
                strict,
            )
            sources[name] = source
        for name in filter(chosen, self._objects):
            if name not in sources:
                _doubt(f"the checkpoint holds no state of {name!r}, which stays as it is", strict)
        for name, source in sources.items():
            self._load_one(self._objects[name], states[source])
        self._unclaimed = {k: v for k, v in states.items() if k not in sources.values()}
        self._unclaimed_unnamed = [name for name in saved["unnamed"] if name in self._unclaimed]

    def _load_one(self, obj: Any, state: Any) -> None:
        if self._undo is not None:
            # On the CPU, because the device may have no memory for a second copy.
            host = map_tensors(obj.state_dict(), lambda tensor: tensor.detach().cpu())
            self._undo.append(partial(obj.load_state_dict, copy.deepcopy(host)))
        obj.load_state_dict(state)

    def _by_position(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """Pair unnamed objects with unnamed states by order, if there are equally many."""
        names = [name for name in self._unnamed if name not in saved["objects"]]
        saved_names = [name for name in saved["unnamed"] if name not in self._objects]
        return dict(zip(names, saved_names, strict=True)) if len(names) == len(saved_names) else {}

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Restore all objects to their state before the block if it raises."""
        undo = self._undo = []
        unclaimed = self._unclaimed, self._unclaimed_unnamed
        try:
            yield
        except BaseException:
            self._unclaimed, self._unclaimed_unnamed = unclaimed
            for restore in reversed(undo):
                # The first error is the obj to report.
                with suppress(Exception):
                    restore()
            raise
        finally:
            self._undo = None


class RegisteredPart(CheckpointPart):
    """Objects that the user has registered; they load before the rest, as they may refuse.

    Args:
        registered: the objects.
    """

    name = "registered"

    def __init__(self, registered: Registered) -> None:
        self._registered = registered

    def capture(self) -> Sections:
        """Return the states."""
        return {self.name: self._registered.state_dict()}, {}

    def check(self, load: Load) -> None:
        """Refuse nothing: each object is looked for as it is loaded."""

    def plan(self, load: Load) -> None:
        """Read what is selected alone, if no hook is to be given all."""
        if load.lazy:
            load.first[self.name] = load.selected[self.name]

    def place(self, load: Load) -> None:
        """Load the objects."""
        self._registered.load_state_dict(
            load.selected[self.name],
            strict=load.strict,
            chosen=lambda name: load.takes(f"registered/{name}"),
        )

    def undone_by_a_failure(self) -> AbstractContextManager[None]:
        """Return a context that loads the objects' states of before, if it raises."""
        return self._registered.all_or_nothing()


def _check(candidates: list[tuple[str, Any]]) -> None:
    """Raise one error for all objects that cannot be saved."""
    lacking = [
        f"  {name}: {_show(obj)} lacks {' and '.join(missing)}"
        for name, obj in candidates
        if (missing := [m for m in ("state_dict", "load_state_dict") if not _has(obj, m)])
    ]
    if lacking:
        raise ValueError(
            "objects are registered for checkpoints by what their state_dict() and "
            "load_state_dict(state) do:\n" + "\n".join(lacking)
        )


def _has(obj: Any, method: str) -> bool:
    return not isinstance(obj, type) and callable(getattr(obj, method, None))


def _show(obj: Any) -> str:
    return f"the class {obj.__qualname__}" if isinstance(obj, type) else type(obj).__qualname__


def _doubt(text: str, strict: bool) -> None:
    if strict:
        raise ResumeError(text + "; pass strict=False to accept that.")
    warn(text + ".")
