"""RunIdentity: the name and config by which a run recognizes its own checkpoints."""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

__all__ = ["RunIdentity", "config_fields"]

#: Settings that say how far to train, or how to start: another value is no other run.
_USUAL = frozenset(
    {
        "epochs",
        "max_epochs",
        "num_epochs",
        "n_epochs",
        "num_train_epochs",
        "train_epochs",
        "total_epochs",
        "max_steps",
        "max_train_steps",
        "num_train_steps",
        "num_training_steps",
        "train_steps",
        "total_steps",
        "max_iters",
        "max_iterations",
        "resume",
        "no_resume",
        "resume_from",
        "resume_from_checkpoint",
        "local_rank",
    }
)
_UNNAMED = "run"  # the default of Accelerator.run
_SHOWN = 8  # differences in an error
_LONGEST = 60  # characters of a value in an error
_ABSENT = object()


@dataclass(frozen=True)
class RunIdentity:
    """The name and config of a run, as they are saved with its checkpoints.

    Args:
        name: of the run; ``"run"`` for one without a name.
        config: plain JSON types; empty for a run without a config.
        may_change: dotted keys or glob patterns that are not compared.

    Example:
        >>> from accel_callbacks.loop.run_identity import RunIdentity
        >>> saved = RunIdentity.of("digits", {"lr": 0.1, "epochs": 3}).state_dict()
        >>> RunIdentity.of("digits", {"lr": 0.2, "epochs": 5}).differences(saved)
        ['config lr: 0.1 -> 0.2']
    """

    name: str
    config: dict[str, Any]
    may_change: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, config: Any = None, may_change: Iterable[str] = ()) -> RunIdentity:
        """Return the identity of a run, with the config as it is now.

        Args:
            name: of the run.
            config: a mapping, a dataclass or a namespace, or ``None``.
            may_change: dotted keys or glob patterns; one text is one key.

        Raises:
            TypeError: ``config`` is something else.
        """
        keys = (may_change,) if isinstance(may_change, str) else tuple(may_change)
        if config is None or (isinstance(config, Mapping) and not config):
            return cls(name, {}, keys)
        from loggers import plain_config

        return cls(name, plain_config(config), keys)

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved with a checkpoint."""
        return {"name": self.name, "config": self.config}

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return one line for each difference from a saved identity: key, old and new value.

        A name or config that either run lacks is not compared.

        Args:
            saved: from :meth:`state_dict`.
        """
        lines = []
        names = (str(saved["name"]), self.name)
        if names[0] != names[1] and _UNNAMED not in names:
            lines.append(f"name: {names[0]!r} -> {names[1]!r}")
        if not saved["config"] or not self.config:
            return lines
        old, new = _flat(saved["config"]), _flat(self.config)
        for key in dict.fromkeys([*old, *new]):
            before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
            if not self._may_differ(key) and not _same(before, after):
                lines.append(f"config {key}: {_short(before, key)} -> {_short(after, key)}")
        return lines

    def _may_differ(self, key: str) -> bool:
        if key.rpartition(".")[2].lower().replace("-", "_") in _USUAL:
            return True
        return any(
            fnmatchcase(key, pattern) or key.startswith(f"{pattern}.")
            for pattern in self.may_change
        )

    def refusal(self, path: str, differences: list[str]) -> str:
        """Return the text of the error for a checkpoint that is of another run."""
        more = len(differences) - _SHOWN
        lines = differences[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        return (
            f"the newest checkpoint, {path}, is of another run than {self.name!r} "
            "(saved -> now):\n  " + "\n  ".join(lines) + "\n"
            "Pass resume=False to start afresh, give this run a folder of its own "
            "(project_dir=, or the dirpath of Checkpoint), or pass resume='anyway' to go on from "
            "it. A setting that may differ between two starts of one run goes into may_change=."
        )


def config_fields(config: Any) -> dict[str, Any]:
    """Return the settings of a mapping, a dataclass or a namespace as a new dict."""
    if isinstance(config, Namespace | SimpleNamespace):
        return dict(vars(config))
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dict(config or {})


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings by dotted keys; lists are one value each."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _same(old: Any, new: Any) -> bool:
    """Return whether two plain values are equal; NaN equals itself."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    if isinstance(old, float) and isinstance(new, float) and math.isnan(old):
        return math.isnan(new)
    return bool(old == new)


def _short(value: Any, key: str) -> str:
    if value is _ABSENT:
        return "(absent)"
    from loggers.redaction import HIDDEN, redacted

    shown = redacted(value, key)
    text = HIDDEN if shown == HIDDEN else repr(shown)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
