"""Observer: what goes along with the runs of an Accelerator without being one of its callbacks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.project import ProjectConfiguration
    from accel_callbacks.loop.run import TrainingRun
    from accel_callbacks.options import AcceleratorConfig

    #: Makes the observer of an Accelerator from its options; None where they ask for none.
    CreateObserver = Callable[[ProjectConfiguration, AcceleratorConfig], "Observer | None"]

__all__ = ["Observer", "create_observers", "first_answer", "register_observer"]

_registered: OrderedDict[int, CreateObserver] = OrderedDict()


class Observer:
    """Sees the runs of an Accelerator, and may refuse or redirect what they do.

    It has no state in checkpoints and no vote, and is listed nowhere: a run with it is the run
    without it. Between :meth:`open` and :meth:`close` each method that has the name of a hook of
    :class:`~accel_callbacks.callbacks.Callback` is called before those of the callbacks. In place
    of ``on_train_batch_end`` it has ``end_batch(run, batch)``, which costs less.

    Attributes:
        scratch_folder: takes the place of the project's folder, and the run writes to nothing else:
            no tracker is opened, and no folder is leased. None for the project's own.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Observer, register_observer
        >>> class Loud(Observer):
        ...     def open(self, run):
        ...         print("begin", run.name)
        ...         return True
        ...
        ...     def close(self, status, error=None):
        ...         print(status)
        ...         return {}
        >>> handle = register_observer(lambda project, config: Loud())
        >>> with Accelerator(cpu=True).run("demo"):
        ...     pass
        begin demo
        success
        >>> handle.remove()
    """

    scratch_folder: str | None = None

    def attach(self, accelerator: Any) -> None:
        """Meet the Accelerator, once it is complete: the place to register a part of its state.

        Args:
            accelerator: the :class:`~accel_callbacks.Accelerator`.
        """

    def open(self, run: TrainingRun) -> bool:
        """Collective: begin a run, once it is resumed; return whether it is observed."""
        return True

    def close(self, status: str, error: BaseException | None = None) -> Mapping[str, float]:
        """End a run that was opened, and return values for its trackers.

        It is not collective, since an error may end the run on one rank alone.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``; or the run's own word.
            error: ends the run; None if it succeeds.
        """
        return {}

    def may_save(self) -> bool:
        """Return whether a save of the training state writes anything.

        If not, hooks of a save are called all the same, since they may change what they save. It
        must be the same on all ranks. An error that it raises refuses the save.
        """
        return True

    def resume_path(self) -> str | None:
        """Return what a run resumes from, ``""`` for nothing, None to leave it as asked."""
        return None

    def rollback_target(self, step: int) -> str | None:
        """Return where a rollback after a step goes to, ``""`` for nowhere, None to search."""
        return None

    def past_commands(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the commands that the run has had, in order; None where it takes new ones."""
        return None


def register_observer(create: CreateObserver) -> RemovableHandle:
    """Register what makes an observer for each Accelerator that is built from now on.

    Args:
        create: called with the project and the configuration; returns an :class:`Observer`, or
            None where the options ask for none.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        TypeError: ``create`` cannot be called.

    Example:
        >>> from accel_callbacks.callbacks import register_observer
        >>> register_observer(lambda project, config: None).remove()
    """
    if not callable(create):
        raise TypeError(
            f"register_observer({create!r}): pass a function of the project and the configuration "
            "that returns an Observer or None."
        )
    handle = RemovableHandle(_registered)
    _registered[handle.id] = create
    return handle


def create_observers(
    built_in: Sequence[CreateObserver], project: ProjectConfiguration, config: AcceleratorConfig
) -> tuple[list[Observer], ProjectConfiguration]:
    """Return the observers of an Accelerator, and its project, or what takes the place of that.

    Args:
        built_in: of add-ons; what was registered is asked before them.
        project: as the options have it.
        config: of the Accelerator.

    Raises:
        TypeError: a registered function has returned something else.
    """
    observers: list[Observer] = []
    for create in (*_registered.values(), *built_in):
        observer = create(project, config)
        if observer is None:
            continue
        if not isinstance(observer, Observer):
            raise TypeError(
                f"{create!r}, given to register_observer, returned {observer!r}: return a subclass "
                "of accel_callbacks.callbacks.Observer, or None."
            )
        observers.append(observer)
        if observer.scratch_folder is not None:
            project = type(project)(observer.scratch_folder)
    return observers, project


def first_answer(observers: Sequence[Observer], question: str, *facts: Any) -> Any:
    """Return what the first observer answers that does not leave a question open; None if all do.

    Args:
        observers: in order.
        question: name of a method.
        facts: its arguments.
    """
    answers = (getattr(observer, question)(*facts) for observer in observers)
    return next((answer for answer in answers if answer is not None), None)
