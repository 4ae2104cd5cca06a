"""Our callbacks in Lightning's own Trainer."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Callback
from accel_callbacks.callbacks import (
    EMA,
    Checkpoint,
    DeviceStats,
    EarlyStopping,
    Freeze,
    GradientAccumulationScheduler,
    GradientNorm,
    LearningRateMonitor,
    ModelSummary,
    NonFinite,
    Preemption,
    ProgressBar,
    Throughput,
    Timer,
    WeightAveraging,
    configured,
)
from accel_callbacks.callbacks.adapters import NotInAPlainLoop, to_lightning
from tests.integrations.small_loop import data

pl = pytest.importorskip(
    "lightning.pytorch", reason="Lightning is not installed: scripts/test_adapters"
)


class Module(pl.LightningModule):
    """Logs a loss at each step, and a score that the test chooses after each epoch."""

    def __init__(self, scores: list[float] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.scores = scores
        self.evaluated: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.evaluated.append(self.layer.weight.detach().clone())
        score = 1.0 if self.scores is None else self.scores[self.current_epoch]
        self.log("score", score)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.05)


def fit(
    callbacks: list[Any],
    folder: Path,
    epochs: int = 2,
    module: Module | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> Any:
    """Three batches an epoch, then a validation."""
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[to_lightning(one) for one in callbacks],
        default_root_dir=folder,
        logger=pl.loggers.CSVLogger(folder, flush_logs_every_n_steps=1),
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = module or Module()
    loaders = [torch.utils.data.DataLoader(data(), batch_size=n) for n in (4, 12)]
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


def column(trainer: Any, name: str) -> list[float]:
    with open(Path(trainer.logger.log_dir) / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


class Trace(Callback):
    """Notes each call of a hook, and where the run stands."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def setup(self, run: Any, model: Any, stage: str) -> None:
        self.calls.append(("setup", run.resumed_from))

    def on_train_epoch_start(self, run: Any, model: Any) -> None:
        self.calls.append(("epoch", run.current_epoch, run.epochs_done, run.max_epochs))

    def on_train_batch_end(self, run: Any, model: Any, outputs: Any, batch: Any, i: int) -> None:
        self.calls.append(("batch", i, run.global_step, run.is_last_batch))

    def on_after_optimizer_step(self, run: Any, model: Any, optimizer: Any) -> None:
        self.calls.append(("step", run.global_step, optimizer is run.optimizers[0]))

    def on_log(self, run: Any, model: Any, metrics: Any, step: int) -> None:
        self.calls.append(("log", sorted(metrics), step))

    def on_validation_end(self, run: Any, model: Any) -> None:
        self.calls.append("validation")

    def on_train_epoch_end(self, run: Any, model: Any) -> None:
        self.calls.append(("epoch end", run.epochs_done))

    def on_exception(self, run: Any, model: Any, exception: BaseException) -> None:
        self.calls.append(type(exception).__name__)

    def teardown(self, run: Any, model: Any, stage: str) -> None:
        self.calls.append("teardown")


def test_hooks_come_at_the_same_places(tmp_path: Path) -> None:
    trace = Trace()
    fit([trace], tmp_path, 1, accumulate_grad_batches=2)
    assert trace.calls == [
        ("setup", None),
        ("epoch", 0, 0, 1),
        ("log", ["loss"], 0),
        ("batch", 0, 0, False),
        ("step", 1, True),
        ("log", ["loss"], 1),
        ("batch", 1, 1, False),
        ("step", 2, True),
        ("log", ["loss"], 2),
        ("batch", 2, 2, True),
        "validation",
        ("log", ["score"], 2),
        ("epoch end", 1),
        "teardown",
    ]


class Fails(Callback):
    def on_train_epoch_end(self, run: Any, model: Any) -> None:
        run.accelerator.gather_for_metrics(1)


def test_what_only_our_run_has_is_named_and_callbacks_are_torn_down(tmp_path: Path) -> None:
    trace = Trace()
    text = "Fails needs run.accelerator.gather_for_metrics, which only accel.run has"
    with pytest.raises(NotInAPlainLoop, match=f"^{text}$"):
        fit([trace, Fails()], tmp_path, 1)
    assert trace.calls[-2:] == ["NotInAPlainLoop", "teardown"]
    with pytest.warns(UserWarning, match="Fails.on_train_epoch_end failed; the callback stays"):
        fit([configured(Fails(), on_error="warn")], tmp_path, 1)


def test_early_stopping_stops_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopper = EarlyStopping("score", patience=2)
    trainer = fit([stopper], tmp_path, 9, Module([4, 3, 3.5, 3.2] + [0] * 5))
    assert trainer.global_step == 4 * 3
    assert (stopper.best, stopper.wait_count) == (3.0, 2)
    assert "stop at step 12: score did not improve on 3 in 2 checks" in capsys.readouterr().out


def test_timer_stops_the_trainer(tmp_path: Path) -> None:
    assert fit([Timer(1e-6)], tmp_path, 9).global_step < 3


def test_the_average_is_evaluated_and_the_weights_are_saved(tmp_path: Path) -> None:
    live: list[torch.Tensor] = []

    class Look(Callback):
        def on_train_batch_end(self, run: Any, model: Any, *args: Any) -> None:
            live.append(model.layer.weight.detach().clone())

    module, ema = Module(), EMA(decay=0.5)
    trainer = fit([ema, Look()], tmp_path, 1, module, num_sanity_val_steps=0)
    average = live[0].clone()
    for weight in live[1:]:
        average = 0.5 * average + 0.5 * weight
    torch.testing.assert_close(module.evaluated[0], average)
    torch.testing.assert_close(module.layer.weight.detach(), live[-1])
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert torch.equal(saved["state_dict"]["layer.weight"], live[-1])


def test_state_goes_on_from_lightnings_checkpoint(tmp_path: Path) -> None:
    whole, first, second = (EMA(decay=0.5) for _ in range(3))
    fit([whole], tmp_path, 2)
    half = fit([first], tmp_path, 1)
    trace = Trace()
    path = half.checkpoint_callback.best_model_path
    fit([second, trace], tmp_path, 2, ckpt_path=path)
    assert (second.updates, whole.updates) == (6, 6)
    torch.testing.assert_close(
        second.state_dict()["average"], whole.state_dict()["average"], rtol=0, atol=0
    )
    assert trace.calls[1][:3] == ("epoch", 1, 1)


def test_what_callbacks_log_comes_to_the_trainers_loggers(tmp_path: Path) -> None:
    trainer = fit([LearningRateMonitor(), GradientNorm()], tmp_path, 1)
    assert column(trainer, "lr-SGD") == [0.05] * 3
    assert len(column(trainer, "grad_norm")) == 3
    assert min(column(trainer, "grad_norm")) > 0
    assert float(trainer.callback_metrics["lr-SGD"]) == 0.05


def test_freezing_follows_the_trainers_epochs(tmp_path: Path) -> None:
    module, seen = Module(), []

    class Look(Callback):
        def on_train_epoch_end(self, run: Any, model: Any) -> None:
            seen.append(model.layer.weight.detach().clone())

    before = module.layer.weight.detach().clone()
    fit([Freeze({"layer.weight": "1 epochs"}), Look()], tmp_path, 2, module)
    assert torch.equal(seen[0], before)
    assert not torch.equal(seen[1], before)


def test_the_window_follows_the_schedule(tmp_path: Path) -> None:
    trainer = fit([GradientAccumulationScheduler({0: 1, 1: 3})], tmp_path, 2)
    assert trainer.global_step == 3 + 1


def test_a_bad_gradient_is_named(tmp_path: Path) -> None:
    class Spoil(Callback):
        def on_after_backward(self, run: Any, model: Any) -> None:
            model.layer.weight.grad[0, 0] = float("nan")

    with pytest.raises(Exception, match=r"layer.weight"):
        fit([Spoil(), NonFinite(action="raise")], tmp_path, 1)


@pytest.mark.parametrize(
    "make",
    [ProgressBar, ModelSummary, Throughput, lambda: WeightAveraging(every_n_epochs=1), DeviceStats],
)
def test_others_run_there_too(make: Any, tmp_path: Path) -> None:
    assert fit([make()], tmp_path, 1).global_step == 3


@pytest.mark.parametrize("make", [lambda: Checkpoint("c"), Preemption])
def test_those_that_need_our_saves_are_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot run in pl.Trainer: it (saves|needs a save)"):
        to_lightning(make())


class Saved(Callback):
    def on_checkpoint_saved(self, run: Any, model: Any, path: str) -> None:
        """Never."""


def test_hooks_without_a_place_are_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"Saved.on_checkpoint_saved is never called in pl"):
        to_lightning(Saved())
