"""What a run may have besides: each add-on is a folder that no other room needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from accel_callbacks.addons.journal import REPLAY

if TYPE_CHECKING:
    from accel_callbacks.callbacks.observer import CreateObserver, Observer
    from accel_callbacks.checkpoint.project import ProjectConfiguration
    from accel_callbacks.options import AcceleratorConfig

__all__ = ["OBSERVERS"]


def _create_recorder(project: ProjectConfiguration, config: AcceleratorConfig) -> Observer | None:
    """Return what keeps the journal: of a replay, of a run with a project folder, or none."""
    if REPLAY in os.environ:
        from accel_callbacks.addons.journal.replayed_step import ReplayRecorder

        return ReplayRecorder.requested(os.environ)
    if project.project_dir is None or not config.journal:
        return None
    from accel_callbacks.addons.journal.recorder import Recorder

    return Recorder(project.root)


#: What makes the observers of an Accelerator; a new add-on with one is a line here.
OBSERVERS: tuple[CreateObserver, ...] = (_create_recorder,)
