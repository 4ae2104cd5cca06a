"""Callbacks of other packages for Lightning's Trainer run unmodified in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_callbacks import Accelerator
from tests.integrations.small_loop import data, train

pl_callbacks = pytest.importorskip("lightning.pytorch.callbacks")


def validated(
    callback: Any, scores: list[float], net: nn.Module | None = None, **options: Any
) -> Any:
    """Train an epoch for each score, which is logged inside of the validation."""
    accel = Accelerator(cpu=True, callbacks=[callback], **options)
    net = nn.Sequential(nn.Linear(4, 1)) if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    net, optimizer, loader = accel.prepare(net, optimizer, loader)
    with accel.run("other", resume=False) as run:
        for epoch in run.epochs(len(scores)):
            for inputs, targets in loader:
                accel.backward(nn.functional.mse_loss(net(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            with accel.evaluate(net):
                accel.log({"val_loss": scores[epoch]})
    return run


def test_c14_optuna_prunes_a_trial() -> None:
    optuna = pytest.importorskip("optuna")
    integration = pytest.importorskip("optuna_integration")
    epochs = []

    def objective(trial: Any) -> float:
        pruning = integration.PyTorchLightningPruningCallback(trial, monitor="val_loss")
        scores = [1.0, 0.5, 0.25] if trial.number == 0 else [1.0, 9.0, 9.0]
        epochs.append(validated(pruning, scores).current_epoch)
        return scores[-1]

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    study = optuna.create_study(pruner=pruner)
    study.optimize(objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert study.trials[1].intermediate_values == {0: 1.0, 1: 9.0}
    assert epochs == [2]


def test_c14_metrics_of_torchmetrics_are_logged_by_a_callback() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measures(pl_callbacks.Callback):
        def __init__(self) -> None:
            self.error = torchmetrics.MeanSquaredError()

        def on_validation_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.error.update(module(batch[0]), batch[1])
            module.log("mse", self.error, on_epoch=True)

    done = train([Measures()], epochs=2)
    inputs, targets = data().tensors
    done.model.eval()
    expected = nn.functional.mse_loss(done.model(inputs), targets)
    torch.testing.assert_close(done.run.callback_metrics["mse"], expected)


def test_c14_the_grid_update_of_pytorch_forecasting() -> None:
    grids = pytest.importorskip("pytorch_forecasting.models.nbeats._grid_callback")
    updated = []

    class Kan(nn.Linear):
        def update_kan_grid(self) -> None:
            updated.append(self.weight.detach().clone())

    validated(grids.GridUpdateCallback(update_interval=2), [1.0, 1.0], Kan(4, 1))
    assert len(updated) == 3  # of six steps


def test_c14_a_prediction_writer_of_pytorch_forecasting_is_refused() -> None:
    predict = pytest.importorskip("pytorch_forecasting.callbacks.predict")
    with pytest.raises(TypeError, match="PredictCallback cannot run in a plain loop"):
        Accelerator(cpu=True, callbacks=[predict.PredictCallback()])
