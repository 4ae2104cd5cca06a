"""Unmodified callbacks of Lightning do in a plain loop what they do in its Trainer."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import configured
from accel_callbacks.callbacks.adapters import NotInAPlainLoop, from_lightning
from tests.integrations.small_loop import Net, data, train, weights

cb = pytest.importorskip(
    "lightning.pytorch.callbacks", reason="Lightning is not installed: scripts/test_adapters"
)


def rows(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def logged(folder: Path, name: str) -> list[tuple[int, Any]]:
    """(step, value) as the tracker has them."""
    found = [row for row in rows(folder) if name in row.get("values", {})]
    return [(row["step"], row["values"][name]) for row in found]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("counted", [True, False])
def test_early_stopping_stops_with_its_reason(package: str, counted: bool) -> None:
    callbacks = importlib.import_module(f"{package}.callbacks")
    stopper = callbacks.EarlyStopping("val_loss", patience=2)
    done = train([stopper], 9, scores=[5.0, 4.0, 4.5, 4.2, 9, 9, 9, 9, 9], counted=counted)
    assert done.run.global_step == 4 * 3
    assert "did not improve in the last 2 records" in done.run.stop_reason
    assert stopper.stopped_epoch == 3
    assert stopper.best_score == 4.0


def test_timer_stops_within_an_epoch() -> None:
    timer = cb.Timer(duration={"microseconds": 1})
    done = train([timer], 3)
    assert done.run.global_step == 1
    assert done.run.stop_reason == "Timer asked for it"
    assert timer.time_elapsed() > 0


def test_gradient_accumulation_scheduler_sets_the_window() -> None:
    done = train([cb.GradientAccumulationScheduler({0: 1, 1: 3})], 3)
    assert done.run.global_step == 3 + 1 + 1
    assert done.accel.gradient_accumulation_steps == 3


def test_learning_rates_come_to_the_trackers(tmp_path: Path) -> None:
    monitor = from_lightning(cb.LearningRateMonitor(log_momentum=True), log_every_n_steps=2)
    train([monitor], 2, log_with="jsonl", project_dir=tmp_path)
    # On the start of the batches whose step is the second, fourth and sixth.
    assert logged(tmp_path, "lr-SGD") == [
        (step, pytest.approx(0.05 * 0.9**step)) for step in (1, 3, 5)
    ]
    assert logged(tmp_path, "lr-SGD-momentum")[0] == (1, 0.9)


def test_a_callback_that_wants_a_logger_has_one_without_trackers() -> None:
    monitor = cb.LearningRateMonitor(logging_interval="epoch")
    done = train([monitor], 2)
    assert monitor.lrs["lr-SGD"] == pytest.approx([0.05, 0.05 * 0.9**3])
    assert done.run.callback_metrics["lr-SGD"] == pytest.approx(0.05 * 0.9**3)


def test_hyperparameters_come_to_the_trackers(tmp_path: Path) -> None:
    tell = cb.LambdaCallback(
        on_train_start=lambda trainer, module: trainer.logger.log_hyperparams({"depth": 3})
    )
    done = train([tell], 1, log_with="jsonl", project_dir=tmp_path)
    assert done.run.config == {"depth": 3}
    assert any('"depth": 3' in json.dumps(row) for row in rows(tmp_path))


def test_device_statistics_are_logged(tmp_path: Path) -> None:
    stats = from_lightning(cb.DeviceStatsMonitor(), log_every_n_steps=3)
    train([stats], 2, log_with="jsonl", project_dir=tmp_path)
    values = logged(tmp_path, "DeviceStatsMonitor.on_train_batch_start/cpu_vm_percent")
    assert [step for step, _ in values] == [2, 5]
    assert all(0 < value < 100 for _, value in values)


def test_throughput_counts_the_samples(tmp_path: Path) -> None:
    monitor = cb.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    train([from_lightning(monitor, log_every_n_steps=1)], 1, log_with="jsonl", project_dir=tmp_path)
    assert [value for _, value in logged(tmp_path, "train/samples")] == [4, 8, 12]
    assert [value for _, value in logged(tmp_path, "validate/samples")] == [6, 12]
    assert logged(tmp_path, "train/device/samples_per_sec")[-1][1] > 0


def test_throughput_of_a_test_stage(tmp_path: Path) -> None:
    monitor = cb.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    adapted = from_lightning(monitor, log_every_n_steps=1)
    train([adapted], 1, stage="test", log_with="jsonl", project_dir=tmp_path)
    assert [value for _, value in logged(tmp_path, "test/samples")] == [6, 12]


@pytest.mark.parametrize("name", ["TQDMProgressBar", "RichProgressBar"])
def test_progress_bars_show_epochs_and_values(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train([getattr(cb, name)()], 2, scores=[0.25, 0.125])
    shown = "".join(capsys.readouterr())
    assert "Epoch 1" in shown
    assert "3/3" in shown
    assert "val_loss" in shown
    assert "0.125" in shown


def test_summaries_show_the_model(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        train([cb.ModelSummary(), cb.RichModelSummary(max_depth=2)], 1)
    parameters = sum(p.numel() for p in Net().parameters())
    (text,) = [m for m in caplog.messages if "Trainable params" in m]
    assert f"{parameters} " in text
    shown = capsys.readouterr().out
    assert "backbone.1" in shown
    assert "BatchNorm1d" in shown


def test_a_summary_runs_the_models_example(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    model.example_input_array = data()[:2][0]
    accel = Accelerator(cpu=True, callbacks=[cb.ModelSummary()])
    accel.prepare(model)
    with caplog.at_level(logging.INFO, "lightning.pytorch"), accel.run("one"):
        pass
    (text,) = [m for m in caplog.messages if "Out sizes" in m]
    assert "[2, 6]" in text
    assert model.training


def test_lambda_callbacks_get_what_the_trainer_gives() -> None:
    seen: list[Any] = []
    first = cb.LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(("setup", stage)),
        on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append(
            (trainer.global_step, index, float(outputs["loss"]) > 0, len(batch[0]))
        ),
        on_before_optimizer_step=lambda trainer, module, optimizer: seen.append(
            type(optimizer).__name__
        ),
    )
    second = cb.LambdaCallback(
        on_validation_batch_start=lambda trainer, module, batch, index: seen.append(
            (trainer.state.fn.value, trainer.state.stage.value, trainer.num_val_batches)
        )
    )
    train([first, second], 1)
    steps = [entry for i in range(3) for entry in ("SGD", (i + 1, i, True, 4))]
    assert seen == [("setup", "fit"), *steps, ("fit", "validate", [2]), ("fit", "validate", [2])]


def test_averaged_weights_at_the_end() -> None:
    snapshots: list[list[torch.Tensor]] = []

    class Snapshots(cb.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            snapshots.append(weights(module))

    done = train([Snapshots(), cb.WeightAveraging(use_buffers=False)], 2)
    for index, value in enumerate(done.model.parameters()):
        names = [name for name, _ in done.model.named_parameters()]
        place = list(done.model.state_dict()).index(names[index])
        mean = torch.stack([snapshot[place] for snapshot in snapshots]).mean(0)
        torch.testing.assert_close(value.detach(), mean)


def test_evaluation_uses_the_moving_average() -> None:
    evaluated, trained = [], []

    class Look(cb.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            trained.append(module.head.weight.clone())

        def on_validation_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            evaluated.append(module.head.weight.clone())

    train([cb.EMAWeightAveraging(decay=0.5), Look()], 2)
    average = trained[0].clone()
    for live in trained[1:3]:
        average = 0.5 * average + 0.5 * live
    torch.testing.assert_close(evaluated[0], average)
    assert not torch.equal(evaluated[0], trained[2])


def test_pruning_leaves_the_asked_share_of_zeros() -> None:
    done = train([cb.ModelPruning("l1_unstructured", amount=0.5)], 1)
    linear = [done.model.backbone[0].weight, done.model.head.weight]
    pruned = [done.model.backbone[0], done.model.head, done.model.backbone[1]]
    values = torch.cat([p.detach().flatten() for m in pruned for p in (m.weight, m.bias)])
    assert (values == 0).sum() == round(len(values) / 2)
    assert all(isinstance(weight, torch.nn.Parameter) for weight in linear)  # made permanent


class HeadFirst(cb.BaseFinetuning):
    """A user's own schedule: the backbone trains from epoch 1 on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


@pytest.mark.parametrize("make", [HeadFirst, lambda: cb.BackboneFinetuning(1)])
def test_finetuning_unfreezes_the_backbone(make: Any) -> None:
    seen = []

    def on_epoch(run: Any, model: Any) -> None:
        seen.append(
            (model.backbone[0].weight.detach().clone(), len(run.optimizers[0].param_groups))
        )

    train([make()], 2, head_only=True, on_epoch=on_epoch)
    torch.manual_seed(0)
    assert torch.equal(seen[0][0], Net().backbone[0].weight)
    assert not torch.equal(seen[1][0], seen[0][0])
    assert [groups for _, groups in seen] == [1, 2]


class NeedsTheTrainer(cb.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert not hasattr(trainer.fit_loop, "restarting")
        assert getattr(trainer, "_val_check_time_interval", None) is None
        trainer.fit_loop.epoch_loop.manual_optimization  # noqa: B018


def test_what_only_the_trainer_has_is_named() -> None:
    text = (
        "NeedsTheTrainer needs trainer.fit_loop.epoch_loop.manual_optimization, which only "
        "pl.Trainer has"
    )
    with pytest.raises(NotInAPlainLoop, match=f"^{text}$"):
        train([NeedsTheTrainer()], 1)


def test_what_cannot_be_set_is_named() -> None:
    def write(trainer: Any, module: Any) -> None:
        trainer.fit_loop.max_epochs = 3

    with pytest.raises(NotInAPlainLoop, match=r"to set trainer.fit_loop.max_epochs"):
        train([cb.LambdaCallback(on_train_epoch_start=write)], 1)


class OwnWriter(cb.BasePredictionWriter):
    def write_on_batch_end(self, *args: Any) -> None:
        """Never."""


class OwnAveraging(cb.StochasticWeightAveraging):
    """A subclass is bound to the Trainer as well."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (cb.BatchSizeFinder, "the Trainer's own loops"),
        (cb.LearningRateFinder, "the Trainer's own loops"),
        (lambda: OwnWriter("batch"), "prediction loop"),
        (lambda: OwnAveraging(0.1), "BatchNorm"),
    ],
)
def test_those_bound_to_the_trainer_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        Accelerator(cpu=True, callbacks=[make()])


class Logs(cb.Callback):
    """Uses the module's log as Lightning's documentation shows."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log("index", float(batch_idx), on_step=True, on_epoch=True)
        pl_module.log("largest", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log("val_index", float(batch_idx), batch_size=1 + 2 * batch_idx)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log_dict({"epoch_end": pl_module.current_epoch})


def test_values_of_the_module_are_of_the_step_or_of_the_epoch(tmp_path: Path) -> None:
    done = train([Logs()], 1, log_with="jsonl", project_dir=tmp_path)
    assert logged(tmp_path, "index_step") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert logged(tmp_path, "index_epoch") == [(3, 1.0)]
    assert logged(tmp_path, "largest") == [(3, 2.0)]
    assert logged(tmp_path, "val_index") == [(3, 0.75)]
    assert logged(tmp_path, "epoch_end") == [(3, 0)]
    assert float(done.run.callback_metrics["index"]) == 1.0


class Touches(cb.Callback):
    """Does to the module what users' callbacks do."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.names = [name for name, _ in pl_module.named_parameters()]
        self.forward = pl_module(data()[:2][0])
        pl_module.note = "kept on the model"
        trainer.shared_note = 7

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.eval()
        self.modes = {module.training for module in pl_module.modules()}
        pl_module.train()
        pl_module.head = torch.nn.Linear(6, 1)  # of the same shape


def test_the_module_is_the_users_model() -> None:
    touches = Touches()
    accel = Accelerator(cpu=True, callbacks=[touches])
    model = accel.prepare(Net())
    before = model.head
    with accel.run("one") as run:
        assert run.shared_note == 7
    assert touches.names == [name for name, _ in Net().named_parameters()]
    assert touches.forward.shape == (2, 1)
    assert model.note == "kept on the model"
    assert touches.modes == {False}
    assert model.training
    assert model.head is not before


class Broken(cb.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ValueError("no")


def test_an_error_ends_the_run_unless_it_is_told_not_to() -> None:
    with pytest.raises(ValueError, match=r"^no$"):
        train([Broken()], 1)
    quiet = cb.LambdaCallback(on_train_epoch_end=lambda *args: 1 / 0)
    with pytest.raises(ValueError, match="calls collectives"):
        train([configured(Broken(), on_error="warn")], 1)
    with pytest.warns(UserWarning, match="division by zero"):
        assert train([configured(quiet, on_error="warn")], 1).run.global_step == 3


def test_lightnings_global_rank_is_put_back() -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    seen = []
    before, rank_zero_only.rank = rank_zero_only.rank, 5
    try:
        train([cb.LambdaCallback(on_fit_start=lambda *args: seen.append(rank_zero_only.rank))], 1)
        assert (seen, rank_zero_only.rank) == ([0], 5)
    finally:
        rank_zero_only.rank = before


def test_a_second_run_begins_anew() -> None:
    stopper = cb.EarlyStopping("val_loss", patience=1)
    assert train([stopper], 9, scores=[1.0, 2.0] + [0.0] * 7).run.global_step == 6
    assert stopper.wait_count == 1
    assert train([stopper], 2, scores=[3.0, 2.0]).run.stop_reason is None
    assert stopper.best_score == 2.0


# --- what callbacks of others read ----------------------------------------------------------------


@pytest.mark.parametrize("counted", [True, False])
def test_c14_minus_one_from_on_train_batch_start_ends_the_epoch(counted: bool) -> None:
    class Skips(cb.Callback):
        def __init__(self) -> None:
            self.trace: list[Any] = []

        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> int | None:
            return -1 if (trainer.current_epoch, batch_idx) == (0, 1) else None

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.trace.append(trainer.current_epoch)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.trace.append("validation")

    skips = Skips()
    done = train([skips], epochs=2, counted=counted)
    assert skips.trace == [0, "validation", 1, 1, 1, "validation"]
    assert done.run.global_step == 4


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_c14_the_experiment_is_the_writer_that_lightning_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    seen = []
    look = cb.LambdaCallback(
        on_train_start=lambda trainer, module: seen.append(trainer.logger.experiment)
    )
    train([look], epochs=1, log_with=["jsonl", name], project_dir=tmp_path)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        assert isinstance(seen[0], SummaryWriter)
    else:
        import wandb

        assert isinstance(seen[0], wandb.Run)


def test_c14_the_module_is_a_container_where_the_model_is_one() -> None:
    seen = {}

    def look(trainer: Any, module: Any) -> None:
        seen.update(first=module[0], size=len(module), parts=list(module), truth=bool(module))

    def look_at_no_container(trainer: Any, module: Any) -> None:
        seen.update(no_container=hasattr(module, "__len__"), still=bool(module))

    for model, function in (
        (torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)), look),
        (torch.nn.Linear(4, 1), look_at_no_container),
    ):
        callback = cb.LambdaCallback(on_train_start=function)
        accel = Accelerator(cpu=True, callbacks=[callback])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accel.prepare(model, optimizer)
        with accel.run("container") as run:
            for _ in run.epochs(1):
                pass
        if function is look:
            assert seen["first"] is model[0]
            assert seen["parts"] == list(model)
            assert (seen["size"], seen["truth"]) == (2, True)
    assert (seen["no_container"], seen["still"]) == (False, True)


def test_c14_the_connector_says_that_one_process_is_not_distributed() -> None:
    seen = []
    look = cb.LambdaCallback(
        on_fit_start=lambda trainer, module: seen.append(
            trainer._accelerator_connector.is_distributed
        )
    )
    train([look], epochs=1)
    assert seen == [False]


def test_the_trainer_has_the_batches_of_the_training_loader() -> None:
    """The validation loader, of as many batches as it likes, may have been prepared first."""
    seen = []

    class Sees(cb.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.append(trainer.num_training_batches)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.num_training_batches)

    accel = Accelerator(cpu=True, callbacks=[Sees()])
    validation = torch.utils.data.DataLoader(data(), batch_size=2)
    training = torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True)
    _, _, training = accel.prepare(Net(), validation, training)
    with accel.run("small") as run:
        for _ in run.epochs(1):
            list(training)
    assert seen == [3, 3]
