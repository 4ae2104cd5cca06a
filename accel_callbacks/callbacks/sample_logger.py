"""SampleLogger: log images, texts and tables of a few samples to the trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from accel_callbacks.callbacks.base import ResumableState, require_at_least
from accel_callbacks.callbacks.interval import Interval
from accel_callbacks.models.undisturbed import undisturbed_eval

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["SampleLogger"]

_STAGES = ("train", "validation", "test")
_TABLE = {"columns", "rows"}


class SampleLogger(ResumableState):
    """Log a model's outputs for a few samples as images, texts or tables.

    ``function(run, model, batch, outputs)`` returns the values to log by name: an image (or a batch
    or list of them) as ``accel.log_images`` takes it, a text or a list of texts, or a table as
    ``{"columns": [...], "rows": [...]}``. It may call the model: modules are in eval mode,
    gradients are off, autocast is on as in training, and modes and random generators are restored
    afterwards. It is called on all ranks; the main process logs.

    Args:
        function: called as above; ``outputs`` is that of the ``on_*_batch_end`` hook.
        stage: ``"validation"`` (default) or ``"test"``, with the first batch of an evaluation, or
            ``"train"``.
        every: minimum interval in steps or epochs, such as ``"500 steps"`` or ``"2 epochs"``; each
            evaluation if ``None``, or in training the first batch of each epoch.
        n: samples to log of each name, 8 by default.
        prefix: of the names, followed by a slash; ``"samples"`` by default.
        channels: ``"first"`` or ``"last"``, if images do not have their channels first in tensors
            and last in arrays.

    Raises:
        ValueError: the stage is unknown, the interval is not in steps or epochs, or ``n`` is
            below 1.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import SampleLogger
        >>> def show(run, model, batch, outputs):
        ...     return {"sum": [f"{row.tolist()} -> {model(row).item():g}" for row in batch]}
        >>> accel = Accelerator(cpu=True, callbacks=[SampleLogger(show, n=1)])
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> torch.nn.init.ones_(model.weight).requires_grad
        True
        >>> model, data = accel.prepare(model, torch.utils.data.DataLoader(torch.ones(3, 2)))
        >>> with accel.evaluate(model):
        ...     for batch in data:
        ...         pass
    """

    name_option = "prefix"

    def __init__(
        self,
        function: Callable[[TrainingRun, Any, Any, Any], Mapping[str, Any]],
        *,
        stage: str = "validation",
        every: str | Interval | None = None,
        n: int = 8,
        prefix: str = "samples",
        channels: Literal["first", "last"] | None = None,
    ) -> None:
        if stage not in _STAGES:
            raise ValueError(f"stage={stage!r} is unknown; use one of {', '.join(_STAGES)}.")
        require_at_least(1, n=n)
        self.interval = None if every is None else Interval.parse(every)
        if self.interval is not None and self.interval.unit not in ("steps", "epochs"):
            raise ValueError(
                f"every={every!r} must be steps or epochs, which all ranks count the same."
            )
        if self.interval is None and stage == "train":
            self.interval = Interval(1, "epochs")
        self.function = function
        self.stage = stage
        self.n = n
        self.prefix = prefix
        self.channels = channels
        # Set on the instance, so that the hooks of other stages cost nothing.
        setattr(self, f"on_{stage}_batch_end", self._log_if_due)
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self._last: int | None = None

    @property
    def state_key(self) -> str:
        """``SampleLogger`` with the stage and the prefix."""
        return f"SampleLogger:{self.stage}:{self.prefix}"

    def _log_if_due(
        self,
        run: TrainingRun,
        model: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log if the interval has passed; in an evaluation, its first batch."""
        in_time = self.stage == "train" or (batch_idx == 0 and dataloader_idx == 0)
        if in_time and self._is_due(run):
            self._log(run, model, batch, outputs)

    def _is_due(self, run: TrainingRun) -> bool:
        if self.interval is None:
            return True
        steps = self.interval.unit == "steps"
        position = run.global_step if steps else run.current_epoch
        # Training passes every step, so there steps count from 0; all else logs at once first.
        last = 0 if self._last is None and steps and self.stage == "train" else self._last
        if last is not None and position - last < self.interval.amount:
            return False
        self._last = position
        return True

    def _log(self, run: TrainingRun, model: Any, batch: Any, outputs: Any) -> None:
        accel = run.accelerator
        with undisturbed_eval(run.models, accel.device), accel.autocast():
            samples = self.function(run, model, batch, outputs)
        images: dict[str, Any] = {}
        texts: dict[str, str] = {}
        for name, value in samples.items():
            name = f"{self.prefix}/{name}"
            if isinstance(value, Mapping):
                columns, rows = _table(name, value)
                accel.log_table(name, columns, rows[: self.n])
            elif isinstance(value, str):
                texts[name] = value
            elif isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value):
                texts[name] = "\n\n".join(value[: self.n])
            else:
                images[name] = _first(value, self.n)
        if texts:
            accel.log_text(texts)
        if images:
            accel.log_images(images, channels=self.channels)

    def state_dict(self) -> dict[str, Any]:
        """Return the step or epoch of the last log."""
        return {"last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place."""
        self._last = state_dict["last"]


def _table(name: str, value: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    if set(value) != _TABLE:
        raise ValueError(
            f"{name!r} is a mapping with {sorted(map(str, value))}: a table is "
            '{"columns": [names], "rows": [one list for each row]}.'
        )
    return list(value["columns"]), list(value["rows"])


def _first(images: Any, n: int) -> Any:
    """Return at most n of a list or batch of images, and a single image unchanged."""
    if isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4:
        return images[:n]
    return images
