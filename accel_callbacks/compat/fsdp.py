"""Save and load one sharded model or optimizer, under the names of ``accelerate.utils``.

``Accelerator.save_state`` saves both with everything else; these are for scripts that call
Accelerate's functions themselves. They write the format of this library, which is one for all
strategies, so any number of ranks loads it, sharded or not.
"""

from __future__ import annotations

import os
import posixpath
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.in_place_reads import InPlaceReads, place_optimizer_state
from accel_callbacks.checkpoint.open import process_group
from accel_callbacks.checkpoint.project import path_in
from accel_callbacks.checkpoint.training_state import without_frozen
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.process_control import synchronize
from accel_callbacks.errors import ResumeError
from accel_callbacks.models.from_pretrained import weights_on_rank_0
from accel_callbacks.strategy.optimizer_state import parameter_names
from checkpoint_io.local_files import local_path

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator

__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "fsdp2_prepare_model",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"
# What `enable_fsdp_ram_efficient_loading` has entered. Global, as transformers is.
_loading = ExitStack()


def enable_fsdp_ram_efficient_loading() -> None:
    """Let only rank 0 load weights in ``from_pretrained`` of transformers from now on.

    ``with accel.cpu_ram_efficient_loading():`` does it for a block.

    Raises:
        ImportError: transformers is not installed.

    Example:
        >>> from accel_callbacks.utils import enable_fsdp_ram_efficient_loading
        >>> enable_fsdp_ram_efficient_loading()  # doctest: +SKIP
    """
    _loading.close()
    _loading.enter_context(weights_on_rank_0(collectives.rank()))


def disable_fsdp_ram_efficient_loading() -> None:
    """Undo :func:`enable_fsdp_ram_efficient_loading`; do nothing without it.

    Example:
        >>> from accel_callbacks.utils import disable_fsdp_ram_efficient_loading
        >>> disable_fsdp_ram_efficient_loading()
    """
    _loading.close()


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Collective: save the weights of a prepared model, each rank its part.

    Args:
        fsdp_plugin: accepted because Accelerate has it; there is one format.
        accelerator: that has prepared the model.
        model: the prepared model.
        output_dir: folder or fsspec URL; the weights are in its ``pytorch_model_fsdp_<index>``.
        model_index: number of the model.
        adapter_only: leave frozen parameters out.

    Raises:
        checkpoint_io.CheckpointError: a rank failed to write; nothing was committed.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.utils import load_fsdp_model, save_fsdp_model
        >>> accel = Accelerator(cpu=True)
        >>> model = accel.prepare(torch.nn.Linear(1, 1))
        >>> save_fsdp_model(None, accel, model, "memory://doc-fsdp")
        >>> other = accel.prepare(torch.nn.Linear(1, 1))
        >>> load_fsdp_model(None, accel, other, "memory://doc-fsdp")
        >>> torch.equal(model.weight, other.weight)
        True
    """
    strategy = accelerator.strategy
    weights = strategy.states.local_state_dict(model)
    if adapter_only:
        weights = without_frozen(weights, strategy.unwrap(model))
    _save(_folder(output_dir, _MODEL, model_index), {"models": {"0": weights}})


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: torch.nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Collective: load what :func:`save_fsdp_model` saved, or Accelerate's, into a prepared model.

    Args:
        fsdp_plugin: accepted because Accelerate has it.
        accelerator: that has prepared the model.
        model: the prepared model; each rank reads its part.
        input_dir: as ``output_dir`` of the save.
        model_index: number of the model.
        adapter_only: frozen parameters were left out, and stay as they are.

    Raises:
        checkpoint_io.CheckpointError: the weights are missing, damaged or of another model.
        RemoteError: another rank failed.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.utils import load_fsdp_model, save_fsdp_model
        >>> accel, model = Accelerator(cpu=True), torch.nn.Linear(1, 1, bias=False)
        >>> save_fsdp_model(None, accel, model, "memory://doc-fsdp-load")
        >>> _ = model.requires_grad_(False).weight.fill_(0.0)
        >>> load_fsdp_model(None, accel, model, "memory://doc-fsdp-load")
        >>> bool(model.weight == 0)
        False
    """
    import checkpoint_io

    bare = accelerator.strategy.unwrap(model)
    folder = _folder(input_dir, _MODEL, model_index)
    with shared_failure("load_fsdp_model"):
        _, unexpected = checkpoint_io.load_model(bare, folder, strict=not adapter_only)
        if unexpected:
            raise ResumeError(f"{folder} has {unexpected[0]!r}, which the model has not.")


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
) -> None:
    """Collective: save the state of a prepared optimizer by parameter name, each rank its part.

    Args:
        fsdp_plugin: accepted because Accelerate has it; there is one format.
        accelerator: that has prepared the optimizer.
        optimizer: the prepared optimizer.
        model: whose parameters it has.
        output_dir: folder or fsspec URL; the state is in its ``optimizer_<index>``.
        optimizer_index: number of the optimizer.

    Raises:
        checkpoint_io.CheckpointError: a rank failed to write; nothing was committed.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.utils import load_fsdp_optimizer, save_fsdp_optimizer
        >>> accel, layer = Accelerator(cpu=True), torch.nn.Linear(1, 1)
        >>> model, optimizer = accel.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.5))
        >>> save_fsdp_optimizer(None, accel, optimizer, model, "memory://doc-fsdp")
        >>> optimizer.param_groups[0]["lr"] = 0.1
        >>> load_fsdp_optimizer(None, accel, optimizer, model, "memory://doc-fsdp")
        >>> optimizer.param_groups[0]["lr"]
        0.5
    """
    strategy = accelerator.strategy
    names = parameter_names([strategy.unwrap(model)])
    state = strategy.states.optimizer_state_dict(_bare(optimizer), names)
    _save(_folder(output_dir, _OPTIMIZER, optimizer_index), {"optimizer": state})


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Collective: load what :func:`save_fsdp_optimizer` saved into a prepared optimizer.

    Args:
        fsdp_plugin: accepted because Accelerate has it.
        accelerator: that has prepared the optimizer.
        optimizer: the prepared optimizer.
        model: whose parameters it has.
        input_dir: as ``output_dir`` of the save.
        optimizer_index: number of the optimizer.
        adapter_only: accepted because Accelerate has it; an optimizer has no frozen parameters.

    Raises:
        ResumeError: the optimizer has other parameters.
        checkpoint_io.CheckpointError: the state is missing or damaged.
        RemoteError: another rank failed.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.utils import load_fsdp_optimizer, save_fsdp_optimizer
        >>> accel, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
        >>> saved = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> save_fsdp_optimizer(None, accel, saved, model, "memory://doc-fsdp-load")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> load_fsdp_optimizer(None, accel, optimizer, model, "memory://doc-fsdp-load")
        >>> optimizer.param_groups[0]["lr"]
        0.5
    """
    import checkpoint_io

    strategy, inner = accelerator.strategy, _bare(optimizer)
    names = parameter_names([strategy.unwrap(model)])
    with shared_failure("load_fsdp_optimizer"):
        folder = _folder(input_dir, _OPTIMIZER, optimizer_index)
        reader = checkpoint_io.open_checkpoint(folder)
        saved = strategy.states.fit_optimizer_state(reader.state["optimizer"], inner, names)
        reads = InPlaceReads(reader)
        state = place_optimizer_state(inner, saved, reads, strategy)
        reads.run(False)
        strategy.states.load_optimizer_state_dict(inner, state)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a sharded checkpoint as ``model.safetensors``; the main rank works.

    ``accel merge-weights`` on the command line.

    Args:
        checkpoint_dir: what :func:`save_fsdp_model` or ``save_state`` wrote, or Accelerate's.
        output_path: another folder, such as the one around it; a model in it is replaced.
        safe_serialization: always on; accepted because Accelerate has it.
        remove_checkpoint_dir: remove the checkpoint afterwards, if it is on a local disk.

    Raises:
        ValueError: ``safe_serialization=False``, which means pickle.
        checkpoint_io.CheckpointError: there are no weights, or they are damaged.

    Example:
        >>> import os, tempfile, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.utils import merge_fsdp_weights, save_fsdp_model
        >>> folder, accel = tempfile.mkdtemp(), Accelerator(cpu=True)
        >>> save_fsdp_model(None, accel, accel.prepare(torch.nn.Linear(1, 1)), folder)
        >>> merge_fsdp_weights(f"{folder}/pytorch_model_fsdp_0", f"{folder}/merged")
        >>> os.listdir(f"{folder}/merged")
        ['model.safetensors']
    """
    if not safe_serialization:
        raise ValueError(
            "safe_serialization=False means pickle, which runs code when it is loaded: leave it "
            "out; any safetensors reader opens model.safetensors."
        )
    from checkpoint_io.weights import merge_weights

    with synchronize("merge_fsdp_weights"):
        if collectives.rank() == 0:
            merge_weights(checkpoint_dir, output_path, overwrite=True)
            path = local_path(os.fspath(checkpoint_dir))
            if remove_checkpoint_dir and path is not None:
                shutil.rmtree(path)


def fsdp2_prepare_model(accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
    """Shard a model that is not trained, such as a reference model, without registering it.

    ``Accelerator.prepare`` is for all others: what it prepares is saved with the run.

    Args:
        accelerator: whose strategy shards it.
        model: the model.

    Returns:
        The model to call.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.utils import fsdp2_prepare_model
        >>> reference = torch.nn.Linear(1, 1)
        >>> fsdp2_prepare_model(Accelerator(cpu=True), reference) is reference
        True
    """
    accelerator.strategy.check(model)
    return accelerator.strategy.setup([model], [], []).models[0]


def _folder(place: str | os.PathLike[str], name: str, index: int) -> str:
    """Return the folder of a model or an optimizer; a path that is one already is kept."""
    path = os.fspath(place)
    last = posixpath.basename(path.replace(os.sep, "/").rstrip("/"))
    return path if last.startswith(f"{name}_") else path_in(path, f"{name}_{index}")


def _save(url: str, state: dict[str, Any]) -> None:
    import checkpoint_io

    checkpoint_io.save(url, state, group=process_group())


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside of a prepared one."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
