"""The training state of an Accelerator: its parts, and their states as one tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.frozen_weights import fingerprints
from accel_callbacks.checkpoint.project import ProjectConfiguration
from accel_callbacks.checkpoint.registered import PreHooks, Registered
from accel_callbacks.checkpoint.tensor_file import writable_folder
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.distributed.rng import capture_rng, devices_of
from accel_callbacks.engines import Strategy
from accel_callbacks.engines.optimizer_state import parameter_names
from accel_callbacks.gradients import parameters_of
from accel_callbacks.local_files import local_path
from accel_callbacks.loop.loop import Loop
from accel_callbacks.models.from_pretrained import pretrained_files
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.precision import Precision
from accel_callbacks.scheduler import AcceleratedScheduler
from accel_callbacks.tracking.trackers import Tracking

__all__ = [
    "ExtraFiles",
    "RestoreReport",
    "TrainingState",
    "split_local_states",
    "with_local_state",
    "without_frozen",
]


@dataclass
class RestoreReport:
    """The names that a load did not restore: ``Accelerator.load_report``.

    Names are those of parameters and buffers, ``"<number of the model>.<name>"``.

    Attributes:
        path: the checkpoint.
        missing: names here that were selected and are not in the checkpoint; they are as before.
        unexpected: names in the checkpoint that were selected and are not here.
        kept: names that the save left out (``trainable_only``, or a hook); they are as before.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> model = accel.prepare(torch.nn.Linear(1, 1))
        >>> path = accel.save_state("memory://doc-report/c")
        >>> accel.load_state(path) == accel.load_report.path, accel.load_report.missing
        (True, [])
    """

    path: str
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


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
        left_at: the state of the boundary to which a run was left, saved in place of that of now.

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
    left_at: tuple[dict[str, Any], dict[str, Any]] | None = None

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

    def capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what all ranks share and what belongs to this rank, as trees of plain values."""
        loop = self.loop
        if self.left_at is not None:
            shared, local = self.left_at
            # The callbacks that save know what they have saved since.
            savers = {entry.key: entry.state() for entry in loop.dispatch.entries if entry.saves}
            return {**shared, "callbacks": {**shared["callbacks"], **savers}}, dict(local)
        position, local = self._capture_position()
        shared = {**self._capture_tensors(), **position}
        if loop.window.is_open and self.strategy.states.keeps_gradients_apart:
            raise RuntimeError(
                "save_state inside of a gradient window: the engine keeps its gradients, and they "
                "would be lost. Save after optimizer.step() has ended the window."
            )
        local_gradients, sharded = self._waiting_gradients()
        if loop.window.is_open or local_gradients or sharded:
            local["window"] = self._open_window(local_gradients)
            if sharded:
                shared["window"] = {"gradients": sharded}
        return shared, local

    def _capture_tensors(self) -> dict[str, Any]:
        """Return the sections of models and optimizers, whose tensors are not copied."""
        strategy = self.strategy
        # First: a hook of FSDP puts the shards back, where a forward has left whole parameters.
        models = [strategy.states.local_state_dict(model) for model in self.models]
        names = parameter_names(self.bare_models)
        sections: dict[str, Any] = {
            "models": _numbered(models),
            "optimizers": _numbered(
                [strategy.states.optimizer_state_dict(o.optimizer, names) for o in self.optimizers]
            ),
        }
        model_files = enumerate(map(pretrained_files, self.bare_models))
        if configured := {str(index): files for index, files in model_files if files}:
            sections["model_files"] = configured
        return sections

    def _capture_position(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the other sections that all ranks share, and what belongs to this rank."""
        loop = self.loop
        # First: a stream that is asked for its position may draw its next samples.
        random = loop.random_at_stop if loop.run.epoch_open else None
        rng, loader_generators = random or self.random_state()
        shared: dict[str, Any] = {
            "schedulers": _numbered([scheduler.state_dict() for scheduler in self.schedulers]),
            "loaders": _numbered([self._position(loader) for loader in self.loaders]),
            "precision": self.precision.state_dict(),
            "run": self._run_position(),
            "callbacks": self.strategy.states.stored(loop.dispatch.state_dict(), self.models),
            "trackers": self.tracking.state_dict(),
            "registered": self.registered.state_dict(),
        }
        for state, generators in zip(shared["loaders"].values(), loader_generators, strict=False):
            state["order"]["generators"] = generators
        if self.strategy.data.copies > 1:
            shared["copies"] = self.strategy.data.copies  # of each data rank's local state
        local: dict[str, Any] = {"rng": rng}
        classes = {kind: self.class_names(kind) for kind in ("optimizers", "schedulers")}
        shared["classes"] = {kind: _numbered(names) for kind, names in classes.items()}
        if options := loop.dispatch.options():
            shared["callback_options"] = options
        if streams := split_local_states(shared["loaders"]):
            local["streams"] = streams
        return shared, local

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

    def class_names(self, kind: str) -> list[str | None]:
        """Return the classes of the prepared optimizers or schedulers, as the user made them.

        Args:
            kind: ``"optimizers"`` or ``"schedulers"``.

        Returns:
            Dotted names, None for an optimizer that an engine has replaced.
        """
        if kind == "schedulers":
            return [_dotted(type(scheduler.scheduler)) for scheduler in self.schedulers]
        owned = self.strategy.owns_step
        return [None if owned else _dotted(type(o.optimizer)) for o in self.optimizers]

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

    def _run_position(self) -> dict[str, Any]:
        """Return the position of the run; a batch without a loader counts once it has worked."""
        waiting = self.loop.own_batches.is_open and not self.loop.worked
        state = self.loop.run.state_dict()
        return {**state, "batch_idx": state["batch_idx"] - waiting}

    def _position(self, loader: DataLoaderShard) -> dict[str, Any]:
        """Return the position of a loader.

        A batch that was delivered and not trained on yet is delivered again after a resume.
        """
        waiting = loader in self.loop.active and loader.trained and not self.loop.worked
        return loader.state_dict(again=waiting and len(self.optimizers) > 0)

    def _waiting_gradients(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the gradients that wait for a step, those of this rank and those that are sharded.

        These are all in an open window. Outside of one, a script may accumulate by itself: those of
        optimizers that have not stepped since the batch began. Sharded ones are averaged over the
        ranks already, so that any number of ranks can go on with them.
        """
        loop, strategy = self.loop, self.strategy
        waiting = None  # all
        if not loop.window.is_open:
            left = [o for o in self.optimizers if o not in loop.stepped_in_batch()]
            if not left or strategy.states.keeps_gradients_apart:
                return {}, {}
            waiting = {id(p) for optimizer in left for p in parameters_of([optimizer])}
        gradients: dict[str, torch.Tensor] = {}
        for index, model in enumerate(self.models):
            found = strategy.states.open_gradients(model)
            for name, parameter in strategy.unwrap(model).named_parameters():
                # One without memory here is of another rank, which steps together with this one.
                mine = waiting is None or id(parameter) in waiting or parameter.is_meta
                if name in found and mine:
                    gradients[f"{index}.{name}"] = found[name]
        sharded = {name: g for name, g in gradients.items() if collectives.is_sharded(g)}
        return {name: g for name, g in gradients.items() if name not in sharded}, sharded

    def _open_window(self, gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state of an open window: a save may come in the middle of one."""
        window = self.loop.window
        return {
            "position": window.position,
            "divisor": window.divisor,
            "normalizer": window.normalizer.state_dict(),
            "averaged_over": self.strategy.data.averaged_over,
            "gradients": gradients,
            "logged": self.tracking.row.state_dict(),
        }

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
        shared["models"] = _numbered(chosen)
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


def _dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _numbered(items: Iterable[Any]) -> dict[str, Any]:
    """Return objects by their number."""
    # By text, as keys are paths: "models/0/weight" is stable if a later object is added.
    return {str(index): item for index, item in enumerate(items)}


def split_local_states(loaders: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Split this rank's own part off the states of loaders; a note of it stays in them."""
    streams = {key: state["stream"] for key, state in loaders.items() if "stream" in state}
    rank_streams = {key: stream for key, stream in streams.items() if "own" in stream}
    for key, stream in rank_streams.items():
        loaders[key]["stream"] = {"own": stream["own"]}
    return rank_streams


def with_local_state(
    loaders: Mapping[str, Mapping[str, Any]], local: Mapping[str, Any] | None, key: str
) -> dict[str, Any]:
    """Return the state of a loader, with this rank's own part if there is one."""
    stream = ({} if local is None else local.get("streams", {})).get(key)
    return {**loaders[key], **({} if stream is None else {"stream": stream})}


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
