"""What of the user's own goes into checkpoints, as methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from accel_callbacks.checkpoint.registered import PreHooks, Registered
from accel_callbacks.facade.parts import Parts

__all__ = ["RegisteringMethods"]


class RegisteringMethods(Parts):
    """Objects and hooks for :meth:`save_state` and :meth:`load_state`."""

    registered: Registered
    pre_hooks: PreHooks

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Save objects with the training state, and restore them with it.

        Each is kept apart by its name: the keyword, or that of its class (with a number from the
        second one on). Where the class has been renamed since, objects without a name of their
        own get their states by position, with a warning. A state for which no object is
        registered is kept for the next save. Register before ``load_state`` and ``run``.

        The state belongs to all processes: ``state_dict()`` is called on each, that of the main
        process is written, and ``load_state_dict`` gets it on each.

        Args:
            *objects: with ``state_dict()`` and ``load_state_dict(state)``; the state is a dict of
                tensors, numpy arrays and plain values, nested as you like.
            **named: the same, by name.

        Raises:
            ValueError: some lack one of the two methods; all of them are listed. Or a name is
                taken.

        Example:
            >>> import tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
            >>> accel.register_for_checkpointing(ema=average)
            >>> path = accel.save_state()
            >>> _ = average.n_averaged.fill_(5)
            >>> _ = accel.load_state(path)
            >>> average.n_averaged
            tensor(0)
        """
        self.registered.add(*objects, **named)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` in :meth:`save_state`, on all processes.

        ``models`` are the prepared ones, ``weights`` their state dicts. What the hook takes out
        of either list is not saved here: the hook saves it in its own way, into ``output_dir``
        (a folder that is there, or the URL where it is not local). What it edits in ``weights``
        is saved as edited; tensors that it drops stay as they are in a load. Files of the hook
        are its own: they are left alone, and are not verified. If a hook raises on any process,
        nothing is committed and all processes raise.

        Args:
            hook: called after those registered before it, with what they left.

        Returns:
            A handle with ``remove()``, which is a context manager too.

        Example:
            >>> import os, tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> def as_text(models, weights, output_dir):
            ...     with open(os.path.join(output_dir, "model.txt"), "w") as file:
            ...         file.write(repr(weights.pop()))
            >>> with accel.register_save_state_pre_hook(as_text):
            ...     path = accel.save_state(tempfile.mkdtemp())
            >>> "model.txt" in os.listdir(path)
            True
        """
        return self.pre_hooks.on_save(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` in :meth:`load_state`, on all processes.

        The hook loads models in its own way, and takes those out of ``models``; the others are
        loaded from the checkpoint afterwards.

        Args:
            hook: called after those registered before it, with the models that they left.

        Returns:
            A handle with ``remove()``, which is a context manager too.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> handle = accel.register_load_state_pre_hook(lambda models, input_dir: None)
            >>> handle.remove()
        """
        return self.pre_hooks.on_load(hook)
