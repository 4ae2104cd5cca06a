"""Read what ``save_state`` of Accelerate itself wrote, without running its pickles."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_callbacks import collectives
from accel_callbacks.accelerator import Accelerator
from accel_callbacks.checkpoint.in_place_reads import InPlaceReads, place_optimizer_state
from accel_callbacks.checkpoint.project import number_of
from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.compat.unprepared import is_unprepared
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.data.order import draws_at_random
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import ResumeError
from accel_callbacks.strategy.optimizer_state import parameter_names
from checkpoint_io.local_files import local_path
from checkpoint_io.warning import warn

__all__ = ["place_of_accelerate", "restore"]

_FILES = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
_PART = re.compile(
    r"(?:model|pytorch_model|pytorch_model_fsdp|optimizer|scheduler|scaler|sampler|dl_state_dict|"
    r"custom_checkpoint|random_states)(?:_[0-9]+)?(?:_rank[0-9]+)?(?:\.[a-z]+)?",
    re.ASCII,
)
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PLACE = (
    "no place in the data was read from the state that Accelerate saved: the next pass begins an "
    "epoch. Leave out what was trained on by skip_first_batches(loader, ...)."
)
_ANEW = (
    "the next pass goes on at the batch at which Accelerate saved, in an order that is drawn anew, "
    "as there: some samples of that epoch come again, and some do not come."
)
_UNUSED = "nothing that is prepared or registered has them"
_REASONS = {
    "sampler": "an object of Accelerate, which only unpickling makes",
    "dl_state_dict": "the place in the data, which loaders read that are prepared with "
    "DataLoaderConfiguration(use_stateful_dataloader=True), unless one process reads for all",
    "random_states": "of processes that are not there now",
}


def place_of_accelerate(
    accelerator: Accelerator, place: str | os.PathLike[str] | None
) -> str | None:
    """Collective: return the folder to load if Accelerate saved it, and not this library.

    Args:
        accelerator: its project has the numbered folders.
        place: the folder; if None, that with the highest number, where folders are numbered.

    Raises:
        RemoteError: rank 0 could not list the folder.
    """
    from checkpoint_io.format import MANIFEST

    found = None
    with shared_failure("load_state"):
        if collectives.rank() == 0:
            if place is None:
                found = _newest(accelerator)
            elif MANIFEST not in (names := _names_in(place)) and names.intersection(_FILES):
                found = os.fspath(place)
    answer: str | None = collectives.broadcast_object(found)
    return answer


def _newest(accelerator: Accelerator) -> str | None:
    """Return the numbered folder of the project that is newest, if Accelerate wrote it."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        return None
    from checkpoint_io.format import MANIFEST

    root = project.path("checkpoints")
    newest, theirs = -1, None
    for name in _names_in(root):
        names, number = _names_in(os.path.join(root, name)), number_of(name)
        # weights alone: a save that was killed, which is told by what it lacks
        if number is not None and number > newest and names & {MANIFEST, *_FILES, *_WEIGHTS}:
            newest, theirs = number, None if MANIFEST in names else os.path.join(root, name)
    return theirs


def _names_in(place: str | os.PathLike[str]) -> set[str]:
    """Return the names in a local folder without a checkpoint of this library."""
    try:
        return set(os.listdir(local_path(os.fspath(place)) or ""))
    except OSError:
        return set()


def restore(accelerator: Accelerator, place: str) -> None:
    """Restore models, optimizers, schedulers, the loss scale, random generators and objects.

    All pickles are read before anything changes. A warning names the parts that are not read.

    Args:
        accelerator: what it has prepared is restored, in the order of its preparation.
        place: the folder.

    Raises:
        ResumeError: a file is missing, or there is none for what is prepared.
        checkpoint_io.CheckpointError: a file is damaged, or does not fit.
        RemoteError: another rank failed.
    """
    with shared_failure("load_state"):
        state = _State(Path(local_path(place) or place))
        for apply in list(_calls(accelerator, state)):
            apply()
    state.tell_unread()


class _State:
    """The folder of a state, and which of its parts are read.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.present = set(os.listdir(folder))
        self._read: dict[str, None] = {}

    def path(self, *names: str) -> Path | None:
        """Return the first of some parts that is there, which is read then."""
        for name in names:
            if name in self.present:
                self._read[name] = None
                return self.folder / name
        return None

    def content(self, name: str) -> Any:
        """Return the content of a file of ``torch.save``.

        Raises:
            ResumeError: it is not there.
        """
        from checkpoint_io.weights.foreign.torch_pickle import load_restricted

        if (path := self.path(name)) is None:
            self._refuse_pieces(name.partition(".")[0])
            raise ResumeError(
                f"{self.folder / name} is not there, and something that it is for is prepared or "
                "registered: nothing was changed. Prepare what was prepared when the state was "
                "saved, or, if that save was killed, load an older one."
            )
        return load_restricted(path, map_location="cpu")

    def weights(self, index: int) -> Path:
        """Return the file or folder with the weights of a model.

        Raises:
            ResumeError: there is none.
        """
        names = [_file_name(name, index) for name in _WEIGHTS]
        found = self.path(*names, f"pytorch_model_fsdp_{index}")
        if found is None:
            self._refuse_pieces("pytorch_model_fsdp")
            raise ResumeError(
                f"{self.folder} has neither {names[0]} nor {names[1]}: nothing was changed. `accel "
                "merge-weights` makes one file of weights that are in pieces, such as those of "
                "DeepSpeed, and load_checkpoint_in_model() loads it."
            )
        return found

    def _refuse_pieces(self, stem: str) -> None:
        """Raise ResumeError for a part of which each process has saved its own piece."""
        pieces = sorted(name for name in self.present if re.match(f"{stem}(_[0-9]+)?_rank", name))
        if pieces:
            raise ResumeError(
                f"{self.folder} has {', '.join(pieces[:2])}, of which each process has a piece "
                "that does not say where it belongs: nothing was changed. Load them by Accelerate "
                "on as many processes, and save them there with state_dict_type="
                "SHARDED_STATE_DICT, or use_dcp=True, which is read on any number."
            )

    def tell_unread(self) -> None:
        """Warn of the parts that were not read, and say which were."""
        unread: dict[str, list[str]] = {}
        for name in sorted(self.present.difference(self._read)):
            if _PART.fullmatch(name):
                stem = re.sub(r"(_[0-9]+)?(\..*)?$", "", name)
                unread.setdefault(_REASONS.get(stem, _UNUSED), []).append(name)
        if unread:
            parts = "; ".join(f"{', '.join(names)} ({why})" for why, names in unread.items())
            warn(f"{self.folder}: read {', '.join(self._read)}, and not read {parts}.")


def _calls(accelerator: Accelerator, state: _State) -> Iterator[Callable[[], Any]]:
    """Read the files; yield the calls that apply them."""
    training = accelerator.training_state
    left = training.pre_hooks.load(training.models, str(state.folder))
    models = [model for model in training.models if any(model is kept for kept in left)]
    for index, model in enumerate(models):
        yield _call_to_load_weights(training.strategy.unwrap(model), state.weights(index))
    for index in range(len(training.optimizers)):
        yield _Optimizer(training, index, state).load
    for index, scheduler in enumerate(training.schedulers):
        yield _call_to_load(scheduler, state.content(_file_name("scheduler.bin", index)))
    if accelerator.scaler is not None:
        yield _call_to_load(accelerator.scaler, state.content("scaler.pt"))
    registered = [each for each in training.registered.objects if not is_unprepared(each)]
    for index, item in enumerate(registered):
        yield _call_to_load(item, state.content(f"custom_checkpoint_{index}.pkl"))
    states = f"random_states_{accelerator.process_index}.pkl"
    if states in state.present:
        generators = state.content(states)
        yield lambda: _restore_random(generators)
    else:
        warn(f"{states} is not there: random generators of this process go on as they are.")
    for rank in range(accelerator.num_processes):
        state.path(f"random_states_{rank}.pkl")  # read by the others
    yield from _positions(accelerator, state)


class _Optimizer:
    """The state of an optimizer, as a file of ``torch.save`` or in a folder of all processes.

    Args:
        training: has the optimizer.
        index: its number.
        state: has the file or folder.

    Raises:
        ResumeError: it is not there, or of other parameters.
    """

    def __init__(self, training: TrainingState, index: int, state: _State) -> None:
        from checkpoint_io.storage import open_store
        from checkpoint_io.weights import DcpSource

        self._strategy = training.strategy
        self._optimizer = training.optimizers[index].optimizer
        self._source: DcpSource | None = None
        if (folder := state.path(f"optimizer_{index}")) is not None:
            self._source = DcpSource(open_store(folder), "optimizer", tensorless=True)
            saved = self._source.tree().get("optimizer")
        else:
            saved = state.content(_file_name("optimizer.bin", index))
        if not isinstance(saved, Mapping) or "param_groups" not in saved:
            raise ResumeError(
                f"{state.folder} has no state of an optimizer where that of optimizer {index} is: "
                "nothing was changed. Load an older one, or prepare the model alone."
            )
        saved = {"state": {}, **saved}  # which a folder without any tensor leaves out
        in_groups = [name for group in saved["param_groups"] for name in group["params"]]
        is_named = any(isinstance(name, str) for name in in_groups)
        self._saved = self._by_position(training, index, saved) if is_named else saved

    def _by_position(
        self, training: TrainingState, index: int, saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        names = parameter_names(training.bare_models)
        # of models with the same names, that of the optimizer's number comes last, and counts
        ordered = sorted(names.values(), key=lambda name: name.startswith(f"{index}."))
        own = {_bare(name.partition(".")[2]): name for name in ordered}
        state = {own.get(_bare(name), name): each for name, each in saved["state"].items()}
        groups = [
            {**group, "params": [own.get(_bare(name), name) for name in group["params"]]}
            for group in saved["param_groups"]
        ]
        named = {**saved, "state": state, "param_groups": groups}
        return self._strategy.states.fit_optimizer_state(named, self._optimizer, names)

    def load(self) -> None:
        """Load it, of a folder what this rank has of each tensor."""
        loaded = self._saved
        if self._source is not None:
            reads = _ReadsOfDcp(self._source)
            loaded = place_optimizer_state(self._optimizer, loaded, reads, self._strategy)
            reads.run()
        self._strategy.states.load_optimizer_state_dict(self._optimizer, loaded)


class _ReadsOfDcp(InPlaceReads):
    """Reads of tensors that ``torch.distributed.checkpoint`` saved."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._source = source

    @staticmethod
    def is_view(saved: Any) -> bool:
        """Return whether it is a tensor that is still to be read."""
        from checkpoint_io.weights import DcpTensor

        return isinstance(saved, DcpTensor)

    def run(self, progress: bool | None = None) -> None:
        """Read all tensors."""
        from checkpoint_io import TransferProgress

        wanted: list[tuple[Any, torch.Tensor]] = [*self._pairs]
        size = sum(target.nbytes for _, target in wanted)
        with TransferProgress("loading", size, progress) as bar:
            self._source.read([(tensor.name, target) for tensor, target in wanted], bar)


def _positions(accelerator: Accelerator, state: _State) -> Iterator[Callable[[], Any]]:
    """Read where loaders were in their epochs; yield the calls that let them go on there."""
    options, told = accelerator.dataloader_config, set()
    alone = options.dispatch_batches and accelerator.num_processes > 1
    for index, loader in enumerate(accelerator.loaders):
        name = _file_name("dl_state_dict.bin", index)
        if loader.rereads or alone or name not in state.present:
            told.add(_PLACE)
        elif batches := _batches(state.content(name)):
            if not options.use_seedable_sampler and draws_at_random(loader.get_sampler()):
                told.add(_ANEW)
            yield _place_in_epoch(loader, batches)
    for text in sorted(told):
        warn(text)


def _batches(position: Mapping[str, Any]) -> int:
    """Return the batches of its epoch that a stateful loader had delivered."""
    if position.get("_iterator_finished"):
        return 0
    snapshot = position.get("_snapshot", {})  # of workers
    steps = snapshot.get("_snapshot_step", 0) + position.get("_steps_since_snapshot", 0)
    return int(position.get("_num_yielded", steps))


def _place_in_epoch(loader: DataLoaderShard, batches: int) -> Callable[[], Any]:
    return lambda: loader.start_at(batches)


def _call_to_load(item: Any, state: Any) -> Callable[[], Any]:
    return lambda: item.load_state_dict(state)


def _call_to_load_weights(model: torch.nn.Module, weights: Path) -> Callable[[], Any]:
    import checkpoint_io

    names = _names_of_model(model, weights)
    return lambda: checkpoint_io.load_model(model, weights, rename=lambda name: names[name])


def _names_of_model(model: torch.nn.Module, weights: Path) -> dict[str, str]:
    """Return the model's names of stored weights, each without what wrappers add to it.

    Accelerate saves the names of the prepared model: those of DDP begin with ``module.``, and a
    compiled module has a part of its own in them.
    """
    from checkpoint_io.weights import ModelTargets, open_weights

    own = {_bare(name): name for name in ModelTargets(model).tensors}
    source = open_weights(weights, 0, None)
    best = bare = {name: _bare(name) for name in (*source.infos, *source.tied)}
    # "module." may be a name of the model's own: it goes where more names match without it
    while bare and all(name.startswith("module.") for name in bare.values()):
        bare = {name: short.removeprefix("module.") for name, short in bare.items()}
        if len(own.keys() & bare.values()) > len(own.keys() & best.values()):
            best = bare
    return {name: own.get(short, name) for name, short in best.items()}


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _file_name(name: str, index: int) -> str:
    """Return the name of the file of the first object, or of a later one."""
    stem, _, ending = name.partition(".")
    return name if index == 0 else f"{stem}_{index}.{ending}"


def _restore_random(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["random_state"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    if "torch_cuda_manual_seed" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])
