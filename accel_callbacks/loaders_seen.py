"""Which prepared loaders a script has used for what."""

from __future__ import annotations

from accel_callbacks.data.loader import DataLoaderShard

__all__ = ["LoadersSeen"]


class LoadersSeen:
    """The loader that was trained on last, and those that were validated and tested on.

    Example:
        >>> from accel_callbacks.loaders_seen import LoadersSeen
        >>> LoadersSeen().training is None
        True
    """

    def __init__(self) -> None:
        self.training: DataLoaderShard | None = None
        self.validation: list[DataLoaderShard] = []
        self.test: list[DataLoaderShard] = []

    def evaluated(self, loader: DataLoaderShard, stage: str) -> None:
        """It is iterated in this stage."""
        known = self.test if stage == "test" else self.validation
        if not any(loader is one for one in known):
            known.append(loader)

    def forget(self) -> None:
        """What was prepared is gone."""
        self.training = None
        self.validation.clear()
        self.test.clear()
