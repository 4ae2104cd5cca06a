"""Callbacks of Lightning on two processes: what they decide together, and what one writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the workers import this file alone

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks.adapters import to_lightning, to_transformers
from tests.integrations.small_loop import data, train
from tests.support.bound import BOUND

cb = pytest.importorskip(
    "lightning.pytorch.callbacks", reason="Lightning is not installed: scripts/test_adapters"
)

pytestmark = pytest.mark.distributed

SHORT = {"timeout": BOUND}


def stop_early(counted: bool) -> tuple[int, Any]:
    rank = int(os.environ["RANK"])
    better = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5]
    scores = [5.0, 6.0, 7.0, 8.0, 9.0, 9.0] if rank else better  # only rank 1 has enough
    stopper = cb.EarlyStopping("val_loss", patience=2)
    run = train([stopper], 6, scores=scores, counted=counted, **SHORT).run
    return run.global_step, run.stop_reason


@pytest.mark.parametrize("counted", [True, False])
def test_early_stopping_stops_both_at_one_step(pool: Any, counted: bool) -> None:
    first, second = pool.run(stop_early, counted)
    assert first[:2] == second[:2]
    assert first[0] < 6 * 2
    assert "did not improve in the last 2 records" in first[1]


class StopsOne(cb.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            trainer.should_stop = True


def stop_one() -> int:
    return train([StopsOne()], 6, **SHORT).run.global_step


def test_a_wish_of_one_process_stops_both(pool: Any) -> None:
    assert pool.run(stop_one) == [4, 4]


def save_best(folder: str) -> tuple[list[str], int]:
    saver = cb.ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1)
    done = train([saver], 3, scores=[3.0, 1.0, 2.0], **SHORT)
    done.accel.load_state(saver.best_model_path)
    done.accel.wait_for_everyone()
    return sorted(p.name for p in Path(folder).glob("[!.]*")), done.accel.current_run.global_step


def test_both_write_one_checkpoint_and_one_removes(pool: Any, tmp_path: Path) -> None:
    assert pool.run(save_best, str(tmp_path / "c")) == [(["epoch=1.ckpt"], 4)] * 2


class LogsRanks(cb.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("rank", float(trainer.global_rank), sync_dist=True)


def log_ranks() -> float:
    return float(train([LogsRanks()], 1, **SHORT).run.callback_metrics["rank"])


def test_values_can_be_averaged_over_the_processes(pool: Any) -> None:
    assert pool.run(log_ranks) == [0.5, 0.5]


class AsksOnOne(Callback):
    """One of ours, whose reason to stop only process 1 has."""

    def __init__(self, can_vote: bool, step: int = 2, save: bool = False) -> None:
        self.can_vote, self.step, self.save = can_vote, step, save

    def on_after_optimizer_step(self, run: Any, model: Any, optimizer: Any) -> None:
        if run.global_rank == 1 and run.global_step == self.step:
            run.stop("rank 1 had enough")
            if self.save:
                run.save_now("for the next time")


def stop_lightning(can_vote: bool) -> tuple[int, Any]:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    Accelerator(cpu=True, **SHORT)  # the group, in which nobody waits for half an hour

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    adapted = to_lightning(AsksOnOne(can_vote))
    trainer = pl.Trainer(
        max_epochs=4, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        plugins=[TorchElasticEnvironment()], callbacks=[adapted],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(data(), batch_size=2))
    return trainer.global_step, adapted._hosted.run.stop_reason


@pytest.mark.parametrize(("can_vote", "step"), [(True, 2), (False, 3)])
def test_a_wish_of_one_process_stops_its_trainer_on_both(
    pool: Any, can_vote: bool, step: int
) -> None:
    assert pool.run(stop_lightning, can_vote) == [(step, "rank 1 had enough")] * 2


def stop_transformers(folder: str, can_vote: bool) -> tuple[int, list[str]]:
    from tests.integrations.test_to_transformers import make_trainer

    Accelerator(cpu=True, **SHORT)
    trainer = make_trainer(Path(folder), 4, save_strategy="no", eval_strategy="no")
    adapted = to_transformers(AsksOnOne(can_vote, step=3, save=True), trainer=trainer)
    trainer.add_callback(adapted)
    trainer.train()
    return trainer.state.global_step, sorted(os.listdir(folder))


@pytest.mark.parametrize(("can_vote", "step"), [(True, 3), (False, 4)])
def test_so_does_the_trainer_of_transformers_which_saves_too(
    pool: Any, tmp_path: Path, can_vote: bool, step: int
) -> None:
    both = pool.run(stop_transformers, str(tmp_path), can_vote)
    assert both == [(step, [f"checkpoint-{step}"])] * 2
