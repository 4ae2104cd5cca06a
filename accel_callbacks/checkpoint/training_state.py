"""The training state of an Accelerator: its parts, and their states as one tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.frozen_weights import fingerprints
from accel_callbacks.checkpoint.part import CheckpointPart, RestoreReport, Sections
from accel_callbacks.checkpoint.project import ProjectConfiguration
from accel_callbacks.checkpoint.registered import PreHooks, Registered
from accel_callbacks.checkpoint.tensor_file import writable_folder
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.distributed.rng import capture_rng, devices_of
from accel_callbacks.loop.loop import Loop
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.precision import Precision
from accel_callbacks.scheduler import AcceleratedScheduler
from accel_callbacks.strategy import Strategy
from accel_callbacks.tracking.trackers import Tracking
from checkpoint_io.local_files import local_path

__all__ = ["ExtraFiles", "TrainingState", "numbered", "without_frozen"]

#: Sections in the order of the file.
_ORDER = (
    *("models", "optimizers", "model_files", "schedulers", "loaders", "precision", "run"),
    *("callbacks", "trackers", "registered", "copies", "classes", "callback_options", "window"),
)


@dataclass
class TrainingState:
    """The parts of an Accelerator whose states make up a checkpoint.

    Attributes:
        strategy: takes the states of models and optimizers, and gives them back.
        precision: has the loss scale of fp16.
        loop: has the run, the callbacks and the gradient window.
        tracking: the trackers.
        project: where the run keeps its files.
        models: the prepared models, a list that grows.
        optimizers: the prepared optimizers, likewise.
        schedulers: the prepared schedulers, likewise.
        loaders: the prepared loaders, likewise.
        registered: objects of the user.
        pre_hooks: hooks of the user.
        load_report: what the last load found, None before the first.
        parts: what a checkpoint is made of, in the order in which it is restored.
        left_state: returns the state of the boundary to which a run was left, saved in place of
            that of now; None elsewhere.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> shared, local = Accelerator(cpu=True).training_state.capture()
        >>> shared["run"]["global_step"], sorted(local["rng"])[:1]
        (0, ['numpy'])
    """

    strategy: Strategy
    precision: Precision
    loop: Loop
    tracking: Tracking
    project: ProjectConfiguration
    models: list[torch.nn.Module]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    loaders: list[DataLoaderShard]
    registered: Registered = field(default_factory=Registered)
    pre_hooks: PreHooks = field(default_factory=PreHooks)
    load_report: RestoreReport | None = None
    parts: list[CheckpointPart] = field(default_factory=list)
    left_state: Callable[[], Sections] | None = None

    @property
    def prepared(self) -> int:
        """Number of the prepared objects of which a load needs as many as the checkpoint holds."""
        return len(self.models) + len(self.optimizers) + len(self.schedulers)

    @property
    def bare_models(self) -> list[torch.nn.Module]:
        """The prepared models as the user built them."""
        return [self.strategy.unwrap(model) for model in self.models]

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.strategy.topology.device

    def class_names(self, kind: str) -> list[str | None]:
        """Return the classes of the prepared optimizers or schedulers, as the user made them.

        Args:
            kind: ``"optimizers"`` or ``"schedulers"``.

        Returns:
            Dotted names, None for an optimizer that an engine has replaced.
        """
        objects: list[Any] = [scheduler.scheduler for scheduler in self.schedulers]
        if kind == "optimizers":
            objects = [optimizer.optimizer for optimizer in self.optimizers]
            if self.strategy.owns_step:
                return [None] * len(objects)
        return [f"{type(one).__module__}.{type(one).__qualname__}" for one in objects]

    def register(self, part: CheckpointPart) -> None:
        """Add a part: each save captures it, and each load restores it.

        Raises:
            ValueError: there is a part of this name.
        """
        if any(known.name == part.name for known in self.parts):
            raise ValueError(f"{part.name!r} is a part of checkpoints already: use another name.")
        self.parts.append(part)

    def capture(self) -> Sections:
        """Return what all ranks share and what belongs to this rank, as trees of plain values."""
        if self.left_state is not None:
            return self.left_state()
        shared: dict[str, Any] = {}
        local: dict[str, Any] = {}
        for part in self.parts:
            of_all, of_rank = part.capture()
            local |= of_rank
            for name, section in of_all.items():
                shared[name] = {**shared[name], **section} if name in shared else section
        # The order in the file does not depend on that of the owners.
        return {name: shared[name] for name in (*_ORDER, *shared) if name in shared}, local

    def nbytes(self) -> int:
        """Return about how many bytes of weights and optimizers' states this rank writes.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> _ = accel.prepare(torch.nn.Linear(3, 1))
            >>> accel.training_state.nbytes()
            16
        """
        tensors = [t for model in self.bare_models for t in (*model.parameters(), *model.buffers())]
        for optimizer in self.optimizers:
            states = getattr(optimizer.optimizer, "state", {}).values()  # engines may have none
            tensors += [v for state in states if isinstance(state, dict) for v in state.values()]
        present = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_meta]
        sharded: list[Any] = [tensor for tensor in present if collectives.is_sharded(tensor)]
        whole = sum(tensor.nbytes for tensor in present if not collectives.is_sharded(tensor))
        shards: int = sum(tensor.to_local().nbytes for tensor in sharded)
        return shards + whole // self.strategy.topology.world_size

    @property
    def random_at_stop(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """What :meth:`random_state` was where an open epoch was left, None elsewhere."""
        position = self.loop.position
        stopped: tuple[dict[str, Any], list[dict[str, Any]]] | None = position.random_at_stop
        return stopped if self.loop.run.epoch_open else None

    def random_state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the state of the random generators, and of those that belong to the loaders."""
        rng = capture_rng(self.device, devices_of(self.models))
        return rng, [loader.random_state() for loader in self.loaders]

    def capture_draws_of_hooks(
        self, before: Mapping[str, Any], shared: dict[str, Any], local: dict[str, Any]
    ) -> None:
        """Capture the generators again where hooks of the save drew: training goes on from there.

        Args:
            before: state of the generators of this rank, before the hooks.
            shared: from :meth:`capture`; changed in place.
            local: the same.
        """
        rng, loader_generators = self.random_state()
        # Where a stream drew samples ahead to tell its position, a resumed one draws them again.
        if rng == before or before != local["rng"]:
            return
        local["rng"] = rng
        for state, generators in zip(shared["loaders"].values(), loader_generators, strict=False):
            state["order"]["generators"] = generators

    def choose_weights(
        self, shared: dict[str, Any], url: str, *, trainable_only: bool = False
    ) -> None:
        """Drop weights from a captured state, and record which ones.

        Dropped are frozen parameters, if ``trainable_only``, but for those that an optimizer has
        trained; the models that a save hook saves itself, and the tensors that it drops from
        others. Of frozen parameters the fingerprints are recorded; collective if some are sharded.

        Args:
            shared: from :meth:`capture`; changed in place.
            url: where the checkpoint will be.
            trainable_only: drop frozen parameters.
        """
        full: list[Any] = list(shared["models"].values())
        chosen = full
        if trainable_only:
            # They hold what was learned, whether or not they are frozen now.
            trained = {id(p) for optimizer in self.optimizers for p in optimizer.optimizer.state}
            chosen = [
                without_frozen(weights, model, trained)
                for weights, model in zip(full, self.bare_models, strict=True)
            ]
            pairs = enumerate(zip(full, chosen, strict=True))
            shared["frozen"] = {
                str(i): fingerprints({n: w for n, w in weights.items() if n not in kept})
                for i, (weights, kept) in pairs
            }
        # A hook may edit the dicts in place, so the names are taken before it is called.
        names = [set(weights) for weights in full]
        if self.pre_hooks.save_some:
            with writable_folder(url) as folder:
                chosen = self.pre_hooks.save(self.models, chosen, folder)
        elif not trainable_only:
            return
        shared["models"] = numbered(chosen)
        shared["dropped_weights"] = {
            str(index): sorted(before - weights.keys())
            for index, (before, weights) in enumerate(zip(names, chosen, strict=True))
            if weights is not None and before - weights.keys()
        }

    def replicated_keys(self) -> Callable[[str], bool] | bool:
        """Collective: return which keys of a checkpoint hold tensors that any rank may write.

        These are the parameters that the strategy keeps alike on all ranks, and the states of their
        optimizers. It is none, so that rank 0 writes, where a hook may have replaced tensors.
        """
        edited = self.pre_hooks.save_some or self.loop.dispatch.saves_differ_between_ranks
        if collectives.any_process(edited):
            return False
        names = {
            str(index): self.strategy.states.replicated_parameters(model)
            for index, model in enumerate(self.models)
        }

        def replicated(key: str) -> bool:
            # Keys are escaped as JSON Pointers are, since names of parameters may have a slash.
            section, *path = (p.replace("~1", "/").replace("~0", "~") for p in key.split("/"))
            if section == "models" and len(path) == 2:
                return path[1] in names.get(path[0], ())
            if section == "optimizers" and len(path) == 4 and path[1] == "state":
                model, _, name = path[2].partition(".")
                return name in names.get(model, ())
            return False

        return replicated


def numbered(items: Iterable[Any]) -> dict[str, Any]:
    """Return objects by their number."""
    # By text, as keys are paths: "models/0/weight" is stable if a later object is added.
    return {str(index): item for index, item in enumerate(items)}


def without_frozen(
    weights: Mapping[str, Any], model: torch.nn.Module, trained: Collection[int] = ()
) -> dict[str, Any]:
    """Return a model's weights without its frozen parameters; buffers stay.

    Args:
        weights: the state of the model.
        model: as the user built it.
        trained: the ids of parameters that stay, frozen or not.
    """
    named = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in named if not p.requires_grad and id(p) not in trained}
    return {name: weight for name, weight in weights.items() if name not in frozen}


class ExtraFiles:
    """Tracks the files that save hooks write beside a checkpoint, which are removed with it.

    Counts files that are new or changed since this object was made, on local disks only.

    Args:
        url: where the checkpoint will be.
    """

    def __init__(self, url: str) -> None:
        self._path = local_path(url)
        self._before = self._files()

    def labels(self) -> dict[str, Any]:
        """Return metadata that name the files, empty if there are none."""
        files = self._files()
        changed = sorted(name for name in files if files[name] != self._before.get(name))
        return {"extra_files": changed} if changed else {}

    def _files(self) -> dict[str, tuple[int, ...]]:
        if self._path is None or not os.path.isdir(self._path):
            return {}
        with os.scandir(self._path) as entries:
            stats = {e.name: e.stat() for e in entries if e.is_file(follow_symlinks=False)}
        return {name: (s.st_mtime_ns, s.st_size, s.st_ino) for name, s in stats.items()}
