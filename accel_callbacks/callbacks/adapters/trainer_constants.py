"""Options of the Trainer that have one value in a plain loop."""

from __future__ import annotations

from typing import Any

__all__ = ["TrainerConstants"]


class TrainerConstants:
    """The loop is the user's: what the Trainer would limit, repeat or check is as it is there.

    Example:
        >>> from accel_callbacks.callbacks.adapters.trainer_constants import TrainerConstants
        >>> TrainerConstants.check_val_every_n_epoch
        1
    """

    barebones = False
    check_val_every_n_epoch = 1
    datamodule: Any = None
    detect_anomaly = False
    # Unknown before the loop has done it; what is made for a validation and not used costs nothing.
    enable_validation = True
    fast_dev_run = False
    gradient_clip_algorithm: Any = None
    gradient_clip_val: Any = None
    limit_predict_batches = 1.0
    limit_test_batches = 1.0
    limit_train_batches = 1.0
    limit_val_batches = 1.0
    max_steps = -1
    max_time: Any = None
    min_epochs: int | None = None
    min_steps: int | None = None
    num_sanity_val_batches: tuple[int, ...] = ()
    num_sanity_val_steps = 0
    overfit_batches = 0.0
    predicting = False
    received_sigterm = False
    reload_dataloaders_every_n_epochs = 0
    sanity_checking = False
    val_check_batch: Any = None
    val_check_interval = 1.0
