"""Lightning's callbacks that save, and the state of all in `save_state`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import checkpoint_io
from accel_callbacks import Callback
from tests.integrations.small_loop import Net, prepare, same, train, weights

cb = pytest.importorskip(
    "lightning.pytorch.callbacks", reason="Lightning is not installed: scripts/test_adapters"
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[!.]*"))


def test_the_best_are_kept_and_can_be_loaded(tmp_path: Path) -> None:
    other = tmp_path / "other.ckpt"  # of another run
    checkpoint_io.save(str(other), {}, metadata={"run_id": "another"})
    saver = cb.ModelCheckpoint(
        tmp_path, "{epoch}-{val_loss:.1f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    seen: list[list[torch.Tensor]] = []
    done = train(
        [saver], 4, scores=[3.0, 1.0, 2.0, 4.0],
        on_epoch=lambda run, model: seen.append(weights(model)),
    )  # fmt: skip
    kept = ["epoch=1-val_loss=1.0.ckpt", "epoch=2-val_loss=2.0.ckpt"]
    assert names(tmp_path) == [*kept, "last.ckpt", "other.ckpt"]
    assert sorted(Path(path).name for path in saver.best_k_models) == kept
    assert done.accel.load_state(saver.best_model_path) == saver.best_model_path
    assert same(weights(done.model), seen[1])
    assert saver.best_model_path.endswith(kept[0])


def test_a_metric_of_the_validation_is_there_in_a_loop_without_epochs(tmp_path: Path) -> None:
    saver = cb.ModelCheckpoint(tmp_path, "{epoch}-{step}", monitor="val_loss", save_top_k=1)
    train([saver], 3, scores=[3.0, 1.0, 2.0], counted=False)
    assert names(tmp_path) == ["epoch=1-step=6.ckpt"]


def test_steps_and_weights_only(tmp_path: Path) -> None:
    saver = cb.ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=2, save_top_k=1, save_weights_only=True
    )
    done = train([saver], 2)
    assert names(tmp_path) == ["step=6.ckpt"]  # those of steps 2 and 4 are gone
    saved = load_file(tmp_path / "step=6.ckpt" / "model.safetensors")
    assert same([saved[name] for name in done.model.state_dict()], weights(done.model))


def test_last_as_a_link(tmp_path: Path) -> None:
    saver = cb.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=1, save_last="link")
    done = train([saver], 2)
    assert (tmp_path / "last.ckpt").resolve().name == "epoch=1.ckpt"
    done.accel.load_state(str(tmp_path / "last.ckpt"))


class SavesOnce(Callback):
    """Saves in the middle of the third epoch, and tells how many batches it saw."""

    runs_last = True
    seen = 0

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        self.seen += 1
        if run.global_step == 7 and self.path is not None:
            run.accelerator.save_state(self.path)


def resumed_like_uninterrupted(make: Any, folder: Path, **options: Any) -> Any:
    """Train in one go, saving on the way, and from there; returns what the rest was."""
    path = str(folder / "half")
    whole = train([make(), SavesOnce(path)], 4, **options)
    rest, last = SavesOnce(), make()
    done = train([last, rest], 4, resume=path, **options)
    assert rest.seen == 12 - 7
    assert same(weights(done.model), weights(whole.model))
    return last, done


def test_early_stopping_goes_on_counting(tmp_path: Path) -> None:
    scores = [1.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    accel, *_ = prepare([first := cb.EarlyStopping("val_loss", patience=3)])
    done = train([first], 3, scores=scores)
    done.accel.save_state(str(tmp_path / "c"))
    second = cb.EarlyStopping("val_loss", patience=3)
    done = train([second], 6, scores=scores, resume=str(tmp_path / "c"))
    assert done.run.current_epoch == 3
    assert second.best_score == 1.0
    assert accel is not done.accel


def test_the_list_of_the_best_survives(tmp_path: Path) -> None:
    def make() -> Any:
        return cb.ModelCheckpoint(tmp_path / "b", "{epoch}", monitor="val_loss", save_top_k=2)

    done = train([make()], 2, scores=[2.0, 3.0])
    done.accel.save_state(str(tmp_path / "c"))
    again = make()
    train([again], 3, scores=[2.0, 3.0, 1.0], resume=str(tmp_path / "c"))
    assert names(tmp_path / "b") == ["epoch=0.ckpt", "epoch=2.ckpt"]
    assert sorted(map(float, again.best_k_models.values())) == [1.0, 2.0]


@pytest.mark.parametrize("make", [cb.WeightAveraging, lambda: cb.EMAWeightAveraging(decay=0.7)])
def test_averages_go_on(make: Any, tmp_path: Path) -> None:
    resumed_like_uninterrupted(make, tmp_path)


def test_finetuning_goes_on(tmp_path: Path) -> None:
    last, rest = resumed_like_uninterrupted(
        lambda: cb.BackboneFinetuning(1), tmp_path, head_only=True
    )
    assert len(rest.optimizer.param_groups) == 2
    assert all(p.requires_grad for p in rest.model.parameters())
    assert last.previous_backbone_lr == rest.optimizer.param_groups[1]["lr"] / 0.9**3


def test_a_backbone_that_is_frozen_still_stays_so(tmp_path: Path) -> None:
    _, rest = resumed_like_uninterrupted(lambda: cb.BackboneFinetuning(9), tmp_path, head_only=True)
    assert not any(p.requires_grad for p in rest.model.backbone[0].parameters())


def test_pruning_goes_on_and_its_checkpoint_is_a_plain_model(tmp_path: Path) -> None:
    def make() -> Any:
        return cb.ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)

    _, done = resumed_like_uninterrupted(make, tmp_path)
    assert not hasattr(done.model.head, "weight_mask")
    plain = Net()
    state = checkpoint_io.load(str(tmp_path / "half")).state["models"]["0"]
    plain.load_state_dict(state)
    assert sum(int((p == 0).sum()) for p in plain.parameters()) > 0


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Odd(cb.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"file": tmp_path}

    done = train([Odd()], 1)
    with pytest.raises(checkpoint_io.UnsupportedStateError, match=r"Odd.*'file'.*PosixPath"):
        done.accel.save_state(str(tmp_path / "c"))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_checkpoint_of_an_error_is_complete(tmp_path: Path, error: type) -> None:
    saver = cb.OnExceptionCheckpoint(tmp_path)

    def fail(run: Any, model: Any) -> None:
        if run.current_epoch == 1:
            raise error("power")

    with pytest.raises(error, match="power"):
        train([saver], 3, on_epoch=fail)
    assert names(tmp_path) == ["on_exception.ckpt"]
    done = train([saver], 3, resume=saver.ckpt_path)
    assert done.run.global_step == 9
    assert names(tmp_path) == []  # the run ended well


class Extra(cb.Callback):
    """Puts something of its own into the checkpoint, and takes it back."""

    def __init__(self) -> None:
        self.taken: Any = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        assert set(checkpoint["state_dict"]) == set(pl_module.state_dict())
        checkpoint["mine"] = {"step": checkpoint["global_step"], "mean": torch.ones(2)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.taken = checkpoint["mine"]


@pytest.mark.parametrize("before_the_run", [False, True])
def test_entries_of_users_callbacks_come_back(tmp_path: Path, before_the_run: bool) -> None:
    done = train([Extra()], 1)
    path = done.accel.save_state(str(tmp_path / "c"))
    extra = Extra()
    accel, *_ = prepare([extra])
    if before_the_run:
        accel.load_state(path)
    with accel.run("again", resume=False if before_the_run else path) as run:
        assert run.global_step == 3
    assert extra.taken["step"] == 3
    assert extra.taken["mean"].tolist() == [1, 1]


class Tagged(cb.Callback):
    """Puts its tag into checkpoints, under one name for all of the class."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.found = ""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["tag"] = self.tag

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["tag"]


def test_c7_two_of_one_class_get_back_their_own_in_any_order(tmp_path: Path) -> None:
    done = train([Tagged("one"), Tagged("two")], 1)
    path = done.accel.save_state(str(tmp_path / "c"))
    one, two = Tagged("one"), Tagged("two")
    accel, *_ = prepare([two, one])
    accel.load_state(path)
    assert (one.found, two.found) == ("one", "two")
