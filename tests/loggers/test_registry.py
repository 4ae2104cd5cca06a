from __future__ import annotations

import pytest

from loggers import (
    JSONLTracker,
    NullTracker,
    Tracker,
    available_trackers,
    create,
    media,
    register_tracker,
    registry,
)


def test_unknown_name_names_the_nearest_and_all() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'tensorboard'\?.*jsonl.*wandb"):
        create("TensorBord")


@pytest.mark.parametrize("name", ["console", "csv", "jsonl", "tensorboard", "wandb"])
def test_built_in_names(name: str) -> None:
    tracker = create(name)
    assert tracker.name == type(tracker).name == name
    assert name in available_trackers()
    kinds = {"console": 0, "csv": 0, "jsonl": 9, "tensorboard": 8, "wandb": 9}
    assert len(media(tracker)) == kinds[name]


def test_classes_and_instances() -> None:
    assert isinstance(create(JSONLTracker, filename="a.jsonl"), JSONLTracker)
    instance = JSONLTracker()
    assert create(instance) is instance
    with pytest.raises(TypeError, match="filename"):
        create(instance, filename="b.jsonl")
    with pytest.raises(TypeError, match="subclass"):
        create(3)  # type: ignore[arg-type]


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))

    class Mine(NullTracker):
        pass

    register_tracker("mine", Mine)
    register_tracker("mine", Mine)
    assert create("mine").name == "mine"
    with pytest.raises(ValueError, match="already registered"):
        register_tracker("mine", JSONLTracker)
    with pytest.raises(TypeError, match="subclass"):
        register_tracker("other", dict)  # type: ignore[arg-type]


def test_null_tracker_swallows_everything() -> None:
    tracker = NullTracker()
    tracker.start(None)  # type: ignore[arg-type]
    tracker.log_images({"a": object()}, step=1)
    with tracker.raw.profile(wait=1) as profile:
        profile.steps = 1
    tracker.raw["config"].update({"a": 1})
    assert not tracker.raw
    assert list(tracker.raw.history()) == []
    assert isinstance(tracker, Tracker)
