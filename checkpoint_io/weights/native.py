"""Weights of one model in a checkpoint of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError
from checkpoint_io.loader.lazy import TensorView, open_checkpoint
from checkpoint_io.progress import TransferProgress
from checkpoint_io.weights.source import Wanted, WeightInfo


class CheckpointSource:
    """The weights under `models/<index>` of a checkpoint, or under `model`.

    Args:
        url: the checkpoint.
        model_index: the number of the model.
        storage_options: passed to the fsspec driver.

    Raises:
        CheckpointNotFoundError: it has no such model.
        CorruptCheckpointError: a file does not match the manifest.
    """

    def __init__(
        self, url: str, model_index: int, storage_options: Mapping[str, Any] | None
    ) -> None:
        self._reader = open_checkpoint(url, storage_options=storage_options)
        self.where = self._reader.path
        tree = _model_in(self._reader.state, model_index, self.where)
        self._views = {key: view for key, view in tree.items() if isinstance(view, TensorView)}
        self._reader.check(keys=[view.key for view in self._views.values()])
        first: dict[str, str] = {}
        names = {key: first.setdefault(v.stored_key, key) for key, v in self._views.items()}
        self.tied = {key: kept for key, kept in names.items() if key != kept}
        self.infos = {
            key: WeightInfo(view.dtype, tuple(view.shape))
            for key, view in self._views.items()
            if key not in self.tied
        }

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Read into the targets; every byte is verified."""
        self._reader.read(
            [(self._views[k], target) for k, target in wanted], cast=True, progress=False
        )
        progress.add(sum(self.infos[key].nbytes for key, _ in wanted))


def _model_in(state: Mapping[str, Any], index: int, where: str) -> Mapping[Any, Any]:
    """Return the state dict of one model in the state of a checkpoint."""
    models = state.get("models")
    if isinstance(models, Mapping):
        found = models.get(str(index), models.get(index))
    elif isinstance(models, (list, tuple)):
        found = models[index] if 0 <= index < len(models) else None
    else:
        found = state.get("model") if index == 0 else None
    if found is None:
        raise CheckpointNotFoundError(
            f"{where} has no model {index}: its state has {', '.join(map(str, state)) or 'nothing'}"
            "; model_index= selects one of models/0, models/1, ..."
        )
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise CorruptCheckpointError(
            f"{where}: its model {index} is not a dict of names to tensors"
        )
    return found
