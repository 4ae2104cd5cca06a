"""The training state of an Accelerator: captured, saved, found, checked, restored.

``accel.save_state``, ``load_state`` and ``save_model`` enter by the ``Checkpointer``, callbacks
that save by its ``write``, and ``accel.run`` by ``find`` and ``restore_newest``. `save.py` captures
each ``CheckpointPart`` of the ``TrainingState`` and hands the trees to `checkpoint_io`, which
writes them. `restore.py` lets all parts plan, read, check, place, restore and finish, one stage
after the other. Whoever owns a state registers a part of it; `parts.py` has the parts of prepared
objects.

Never write to a prepared object before all parts of all ranks have found that the load fits. Never
raise on one rank alone between two collectives: ``together`` and ``shared_failure`` tell the
others. Never rename a section or change what it holds without a default for the old one: each
version loads the checkpoints of those before it, bitwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {"CheckpointPart": "part", "Load": "part", "RestoreReport": "part"}

# A type checker cannot compute it, and takes the imports below instead.
if not TYPE_CHECKING:
    __all__ = sorted(_HOME)

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.part import CheckpointPart as CheckpointPart
    from accel_callbacks.checkpoint.part import Load as Load
    from accel_callbacks.checkpoint.part import RestoreReport as RestoreReport


__getattr__, __dir__ = lazy_names(__name__, _HOME)
