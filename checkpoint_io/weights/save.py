"""Saving model weights in the layout that the Hugging Face libraries open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from checkpoint_io.errors import CheckpointError, UnsupportedStateError
from checkpoint_io.format.tree import TreeEncoder
from checkpoint_io.group import ProcessGroupLike, SingleProcess, TorchGroup
from checkpoint_io.layout.sizes import parse_size
from checkpoint_io.models.model_files import ModelFile, plan_files, write_files
from checkpoint_io.models.whole import Gathering, check_spread
from checkpoint_io.outcome import Outcome, failed_ranks, raise_failure
from checkpoint_io.saver.collect import identity
from checkpoint_io.sharding.dtensor import check_placements, is_dtensor
from checkpoint_io.storage.open import Store, open_store

__all__ = ["save_model"]


def save_model(
    state_dict: Mapping[str, torch.Tensor],
    url: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    storage_options: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    group: ProcessGroupLike | None = None,
    progress: bool | None = None,
) -> list[str]:
    """Save a model's weights so that `safetensors` and `transformers` open them directly.

    Weights that fit `max_shard_size` become `model.safetensors`; larger ones become
    `model-00001-of-0000N.safetensors` and so on, with `model.safetensors.index.json`, which is
    written last. Tied tensors are stored once, under the first of their names in the state dict (an
    embedding, not the head that shares it); the others are noted in the file's metadata. Shards of
    an earlier save are removed afterwards.
    This layout has fixed names, so only a single-file save replaces an older model in one step; a
    sharded one that is killed leaves no index rather than a mix.

    Call it on one rank. If tensors are DTensors, or a `group` is given, it is a collective call:
    rank 0 gathers one tensor after the other and writes, and an error on one rank is one on all.

    Args:
        state_dict: names to tensors (any device, any shape), plain or DTensors.
        url: the folder: a local path or any fsspec URL.
        max_shard_size: largest file, in bytes or as text ("5GB" = 5e9 bytes).
        storage_options: passed to the fsspec driver.
        metadata: text to put into each file's header; `format` is "pt" unless given.
        group: the processes that call together; default: just this one, or all processes of
            `torch.distributed` if there are DTensors.
        progress: a progress bar; None shows one for a long save on a terminal.

    Returns:
        The names of the files written, the index last; on every rank.

    Raises:
        UnsupportedStateError: a value is no dense tensor, or has a dtype the format lacks.
        CheckpointError: another rank failed, or holds other tensors.
        ImportError: the driver for this kind of URL is not installed.

    Example:
        >>> import torch
        >>> from checkpoint_io import save_model
        >>> save_model(torch.nn.Linear(2, 2).state_dict(), "memory://doc-hf/one")
        ['model.safetensors']
        >>> save_model(
        ...     {"a": torch.zeros(4), "b": torch.zeros(4)}, "memory://doc-hf/two", max_shard_size=16
        ... )[-1]
        'model.safetensors.index.json'
    """
    if group is None:
        group = TorchGroup() if any(map(is_dtensor, state_dict.values())) else SingleProcess()
    job = _ModelSave(state_dict, url, group)
    planned = job.agree(
        Outcome.of(lambda: job.plan(max_shard_size, metadata or {}, storage_options)), "plan"
    )
    if any(report != planned[0] for report in planned):
        raise CheckpointError(
            f"saving a model to {os.fspath(url)} failed, nothing was written: the ranks hold "
            "different DTensors; every rank must pass the state dict of the same model"
        )
    names: list[str] = job.agree(Outcome.of(lambda: job.write(progress)), "write")[0]
    return names


class _ModelSave:
    """One rank's part in saving a model."""

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor],
        url: str | os.PathLike[str],
        group: ProcessGroupLike,
    ) -> None:
        self._state_dict = state_dict
        self._url = url
        self._group = group
        self._files: list[ModelFile] = []
        self._store: Store | None = None
        self._order: list[str] = []

    def agree(self, mine: Outcome, what: str) -> list[Any]:
        """Tell all ranks how a step went; raise on all if it failed on one."""
        if mine.error is not None and self._group.world_size == 1:
            raise mine.error
        outcomes = self._group.all_gather_object(mine.to_plain())
        if failed_ranks(outcomes):
            undone = ", nothing was written" if what == "plan" else ""
            raise_failure(
                f"saving a model to {os.fspath(self._url)} failed{undone}", outcomes, mine
            )
        return [outcome["value"] for outcome in outcomes]

    def plan(
        self,
        max_shard_size: int | str,
        metadata: Mapping[str, str],
        storage_options: Mapping[str, Any] | None,
    ) -> list[Any]:
        """Check the tensors and plan the files; return what must be the same on all ranks."""
        limit = parse_size(max_shard_size)
        checked = _checked(self._state_dict)
        if self._group.rank == 0:
            items, tied = _untie(checked)
            self._files = plan_files(items, tied, {"format": "pt", **metadata}, limit)
            self._store = open_store(self._url, storage_options)
            self._order = [key for file in self._files for key, _ in file.tensors]
        return check_spread(checked, self._group)

    def write(self, progress: bool | None) -> list[str] | None:
        """Write on rank 0; on the others give what it asks for."""
        spread = [key for key in self._order if is_dtensor(self._state_dict[key])]
        order = self._group.broadcast_object(spread)
        gathering = Gathering(self._state_dict, order)
        try:
            if self._store is None:
                return None
            return write_files(self._store, self._files, gathering.whole, progress)
        finally:
            gathering.finish()


def _checked(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Refuse what a model file cannot hold."""
    checked: dict[str, torch.Tensor] = {}

    def keep(path: tuple[Any, ...], tensor: torch.Tensor) -> str:
        checked[path[0]] = tensor
        return ""

    encoder = TreeEncoder("state_dict", keep, sharded=True)
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or key == "__metadata__":
            raise UnsupportedStateError(
                f"state_dict[{key!r}] is not a tensor that a model file can hold: leave it out, "
                "or use checkpoint_io.save for a whole training state"
            )
        if is_dtensor(value):
            check_placements(value, f"state_dict[{key!r}]")
        encoder.encode(value, (key,))
    return checked


def _untie(
    checked: Mapping[str, torch.Tensor],
) -> tuple[list[tuple[str, torch.Tensor]], dict[str, str]]:
    """Keep one name of each tied tensor; return what to store, and the other names."""
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for key, tensor in checked.items():  # a base model without the head wants the first name
        mark = identity(tensor)
        if mark is not None and first.setdefault(mark, key) != key:
            tied[key] = first[mark]
    return [(key, tensor) for key, tensor in checked.items() if key not in tied], tied
