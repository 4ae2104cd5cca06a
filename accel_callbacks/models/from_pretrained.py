"""``from_pretrained`` of transformers: weights on rank 0 or sharded, and configuration files."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accel_callbacks.collectives.sharded import class_of

__all__ = ["ShardedByZero", "pretrained_files", "weights_on_rank_0"]


@contextmanager
def weights_on_rank_0(rank: int) -> Iterator[None]:
    """Context manager: ``from_pretrained`` of transformers loads weights on rank 0 alone.

    On the others parameters are on the meta device, and no memory is allocated for what is read.
    transformers asks the environment, which Accelerate writes; here its questions are answered in
    the context instead, for all threads.

    Args:
        rank: of this process.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        importlib.import_module("transformers.modeling_utils")
    except ImportError as error:
        raise ImportError(
            f"from_pretrained is of transformers ({error}): pip install transformers"
        ) from error
    answers: dict[str, Callable[..., Any]] = {
        "is_fsdp_enabled": lambda: True,
        "is_local_dist_rank_0": lambda: rank == 0,
    }
    if rank != 0:
        answers["_materialize_copy"] = _without_values
    originals: dict[str, Any] = {}
    for module, name, before in list(_with_names(answers)):
        originals.setdefault(name, before)
        setattr(module, name, answers[name])
    try:
        yield
    finally:
        # Again by name: modules that were imported in the context have the answers too.
        for module, name, now in list(_with_names(answers)):
            if now is answers[name]:
                setattr(module, name, originals[name])


class ShardedByZero:
    """Make ``from_pretrained`` and ``from_config`` of transformers build models sharded (ZeRO-3).

    transformers keeps a weak reference to it, so it has an effect as long as its owner lives, and
    until another object takes its place.

    Args:
        enabled: whether models are to be built sharded, asked for each.
        config: DeepSpeed's configuration, without ``"auto"``, likewise.
    """

    def __init__(self, enabled: Callable[[], bool], config: Callable[[], dict[str, Any]]) -> None:
        self._enabled = enabled
        self._config = config

    def is_zero3(self) -> bool:
        """Return whether models are built sharded."""
        return self._enabled()

    @property
    def config(self) -> dict[str, Any]:
        """The configuration for ``deepspeed.zero.Init``."""
        return self._config()

    def announce(self) -> None:
        """Register with transformers, if it is installed."""
        if importlib.util.find_spec("transformers") is not None:
            transformers = importlib.import_module("transformers.integrations.deepspeed")
            transformers.set_hf_deepspeed_config(self)


def pretrained_files(model: torch.nn.Module) -> dict[str, str]:
    """Return the configuration of a transformers model by file name, as JSON; {} for others.

    Args:
        model: as the user built it. The wrapper of a PEFT model has other names of weights than
            its configuration is of.
    """
    config: Any = vars(model).get("config")
    if not hasattr(config, "to_json_string") or not hasattr(model, "save_pretrained"):
        return {}
    fields = {**json.loads(config.to_json_string()), "architectures": [class_of(model).__name__]}
    files = {"config.json": json.dumps(fields, indent=2, sort_keys=True)}
    generation: Any = vars(model).get("generation_config")
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string()
    return files


def _with_names(names: Iterable[str]) -> Iterator[tuple[Any, str, Any]]:
    """Yield each module of transformers that has one of the names, with name and function."""
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == "transformers":
            for name in names:
                if callable(function := vars(module).get(name)):
                    yield module, name, function


def _without_values(tensor: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
    """Return a tensor on the meta device, like one in memory or a slice of a safetensors file.

    Versions of transformers before 5 do so themselves; later ones read what each rank has.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.to(device="meta", dtype=dtype)
    if dtype is None:
        from checkpoint_io.format.safetensors import DTYPES

        dtype = DTYPES[tensor.get_dtype()]
    return torch.empty(tuple(tensor.get_shape()), dtype=dtype, device="meta")
