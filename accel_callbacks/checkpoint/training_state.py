"""The training state of an Accelerator: its parts, and their states as one tree."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.checkpoint.part import CheckpointPart, RestoreReport, Sections
from accel_callbacks.checkpoint.project import ProjectConfiguration
from accel_callbacks.checkpoint.registered import PreHooks, Registered
from accel_callbacks.checkpoint.tensor_file import writable_folder
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.distributed.rng import capture_rng, devices_of
from accel_callbacks.errors import ResumeError, nearest
from accel_callbacks.loop.loop import Loop
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.precision import Precision
from accel_callbacks.scheduler import AcceleratedScheduler
from accel_callbacks.strategy import Strategy
from accel_callbacks.tracking.trackers import Tracking
from checkpoint_io.local_files import local_path

__all__ = [
    "ExtraFiles",
    "TrainingState",
    "check_same_model",
    "differing_weights",
    "fingerprints",
    "numbered",
    "without_frozen",
]

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


# --- fingerprints of frozen weights, which tell whether a checkpoint without them fits a model ---

_ELEMENTS = 1024  # of each tensor, evenly spaced: a fine-tuned or another model differs in most
_SHOWN = 3
_UNSEEN = (RuntimeError, NotImplementedError, TypeError)  # of quantized kinds of tensors


def fingerprints(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return shape, dtype and a hash over a sample of the elements of each tensor.

    Tensors without values are left out. One copy from each device. Collective if some are sharded
    (then they must be so on all ranks): the samples are gathered, in one all-reduce, and never a
    tensor, so that the fingerprint is that of the whole tensor.
    """
    present = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    }
    sharded = {name: tensor for name, tensor in present.items() if collectives.is_sharded(tensor)}
    samples = {name: _sample(tensor) for name, tensor in present.items() if name not in sharded}
    data = _to_host({name: sample for name, sample in samples.items() if sample is not None})
    if sharded:
        data |= _gather_samples(sharded)
    return {
        name: [
            list(tensor.shape),
            str(tensor.dtype),
            hashlib.blake2b(data[name], digest_size=8).hexdigest(),
        ]
        for name, tensor in present.items()
        if name in data
    }


def _step(tensor: torch.Tensor) -> int:
    """Return the distance between two elements of a sample, in elements of the whole tensor."""
    return max(1, -(-tensor.numel() // _ELEMENTS))


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of some elements, on the device; None where they cannot be seen."""
    try:
        return tensor.reshape(-1)[:: _step(tensor)].contiguous().view(torch.uint8)
    except _UNSEEN:
        return None


class _Part(NamedTuple):
    """The bytes of the elements of a sample that this rank holds, and their places in it."""

    places: np.ndarray[Any, np.dtype[np.int64]]
    data: torch.Tensor


def _part_of_sample(name: str, tensor: torch.Tensor) -> _Part | None:
    """Return the part of the sample of a sharded tensor; None where it cannot be seen."""
    # Imported here, because a training without sharded weights does not need it.
    from checkpoint_io.sharding import local_boxes, local_of

    shape = tuple(tensor.shape)
    flat = np.arange(0, tensor.numel(), _step(tensor))
    at = np.stack(np.unravel_index(flat, shape)) if shape else np.zeros((0, 1), np.int64)
    try:
        places, indices = [], []
        for box in local_boxes(tensor, repr(name)):
            low = np.array(box.offsets, np.int64).reshape(-1, 1)
            length = np.array(box.shape, np.int64).reshape(-1, 1)
            held = np.flatnonzero(((at >= low) & (at < low + length)).all(axis=0))
            places.append(held)
            indices.append(at[:, held] - low + np.array(box.local_offsets).reshape(-1, 1))
        local = local_of(tensor)
        if not places or not shape:
            return _Part(np.arange(len(places)), local.reshape(-1)[: len(places)].view(torch.uint8))
        chosen = torch.from_numpy(np.concatenate(indices, axis=1)).to(local.device)
        return _Part(np.concatenate(places), local[tuple(chosen)].view(torch.uint8))
    except _UNSEEN:  # UnsupportedStateError is a TypeError
        return None


def _gather_samples(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Collective: return the samples of sharded tensors, whole on each rank.

    One that a rank cannot see is left out on all.
    """
    parts = {name: _part_of_sample(name, tensor) for name, tensor in tensors.items()}
    local_data = _to_host({name: part.data for name, part in parts.items() if part is not None})
    counts = {name: -(-tensor.numel() // _step(tensor)) for name, tensor in tensors.items()}
    sizes = {name: counts[name] * tensor.dtype.itemsize for name, tensor in tensors.items()}
    # Each sample after a byte that says that a rank cannot see it. Elsewhere zeros, so that the
    # maximum over the ranks is what those have that hold it: one, or several replicas.
    buffer = np.zeros(sum(sizes.values()) + len(sizes), np.uint8)
    slots, begin = {}, 0
    for name, part in parts.items():
        slots[name] = slice(begin + 1, end := begin + 1 + sizes[name])
        if part is None:
            buffer[begin] = 1
        elif len(part.places):
            rows = buffer[slots[name]].reshape(counts[name], -1)
            held = np.frombuffer(local_data[name], np.uint8)
            rows[part.places] = held.reshape(len(part.places), -1)
        begin = end
    whole = _maximum(torch.from_numpy(buffer)).numpy()
    return {name: whole[at].tobytes() for name, at in slots.items() if not whole[at.start - 1]}


@collectives.explained("the comparison of frozen weights")
def _maximum(data: torch.Tensor) -> torch.Tensor:
    """Collective: return the element-wise maximum over the ranks, on the CPU."""
    collectives.begin("the comparison of frozen weights", size=len(data))
    if collectives.world_size() > 1:
        data = collectives.on_backend(data)
        dist.all_reduce(data, dist.ReduceOp.MAX, group=collectives.group_for(data))
    return data.cpu()


def _to_host(samples: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the bytes of all samples, with one copy a device."""
    devices: dict[torch.device, list[str]] = {}
    for name, sample in samples.items():
        devices.setdefault(sample.device, []).append(name)
    data_of: dict[str, bytes] = {}
    for names in devices.values():
        data = torch.cat([samples[name] for name in names]).cpu().numpy().tobytes()
        begin = 0
        for name in names:
            end = begin + samples[name].numel()
            data_of[name], begin = data[begin:end], end
    return data_of


def check_same_model(saved: Mapping[str, list[Any]], weights: Mapping[str, Any]) -> None:
    """Raise if frozen weights of the checkpoint are not in the model, or have another shape.

    Args:
        saved: the fingerprints in the checkpoint, by name.
        weights: of the model.

    Raises:
        ResumeError: it is another model.
    """
    start = "the checkpoint was saved without frozen weights, over another model: "
    end = " Build the model that the run was started with."
    for name, (shape, _, _) in saved.items():
        if name not in weights:
            raise ResumeError(f"{start}{name!r} is not in this one.{nearest(name, weights)}{end}")
        if tuple(weights[name].shape) != tuple(shape):
            now = tuple(weights[name].shape)
            raise ResumeError(f"{start}{name!r} had shape {tuple(shape)} and has {now} here.{end}")


def differing_weights(saved: Mapping[str, list[Any]], weights: Mapping[str, Any]) -> str:
    """Describe frozen weights whose values are not those of the save; empty if there are none.

    Collective if some are sharded.

    Args:
        saved: the fingerprints in the checkpoint, by name.
        weights: of the model.
    """
    now = fingerprints({name: weights[name] for name in saved if name in weights})
    changed = [name for name, mark in now.items() if mark != list(saved[name])]
    if not changed:
        return ""
    shown = ", ".join(map(repr, changed[:_SHOWN])) + (", ..." if len(changed) > _SHOWN else "")
    return f"{len(changed)} of {len(saved)} frozen weights differ ({shown})"
