"""Our callbacks in the Trainer of transformers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Callback
from accel_callbacks.callbacks import (
    EMA,
    Checkpoint,
    EarlyStopping,
    GradientNorm,
    LearningRateMonitor,
    Preemption,
    ProgressBar,
    Timer,
)
from accel_callbacks.callbacks.adapters import NotInAPlainLoop, to_transformers
from loggers import CSVTracker, read_jsonl

pytest.importorskip("accelerate", reason="accelerate is not installed: scripts/test_adapters")
hf = pytest.importorskip(
    "transformers", reason="transformers is not installed: scripts/test_adapters"
)


def make_trainer(folder: Path, epochs: int = 1, **options: Any) -> Any:
    """Six batches an epoch, two of them a step; an evaluation and a checkpoint after each epoch."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8,
    )  # fmt: skip
    ids = torch.randint(0, 20, (12, 4), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": one, "labels": int(one[0]) % 2} for one in ids]
    chosen = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 3, **options}
    arguments = hf.TrainingArguments(
        str(folder), num_train_epochs=epochs, per_device_train_batch_size=2, learning_rate=1e-2,
        gradient_accumulation_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, **chosen,
    )  # fmt: skip
    model = hf.BertForSequenceClassification(config)
    return hf.Trainer(model, arguments, train_dataset=data, eval_dataset=data)


def train(
    callbacks: list[Any], folder: Path, epochs: int = 1, resume: Any = None, **options: Any
) -> Any:
    trainer = make_trainer(folder, epochs, **options)
    for callback in callbacks:
        trainer.add_callback(to_transformers(callback, trainer=trainer))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class Trace(Callback):
    """Notes each call of a hook, and where the run stands."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def setup(self, run: Any, model: Any, stage: str) -> None:
        self.calls.append(("setup", run.resumed_from and Path(run.resumed_from).name))

    def on_train_epoch_start(self, run: Any, model: Any) -> None:
        self.calls.append(("epoch", run.current_epoch, run.epochs_done))

    def on_train_batch_start(self, run: Any, model: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(("begin", batch_idx))

    def on_after_optimizer_step(self, run: Any, model: Any, optimizer: Any) -> None:
        self.calls.append(("step", run.global_step))

    def on_train_batch_end(self, run: Any, model: Any, outputs: Any, batch: Any, i: int) -> None:
        self.calls.append(("end", i, run.global_step, run.is_last_batch))

    def on_log(self, run: Any, model: Any, metrics: Any, step: int) -> None:
        self.calls.append(
            ("log", next(n for n in ("eval_loss", "loss", "train_loss") if n in metrics))
        )

    def on_validation_start(self, run: Any, model: Any) -> None:
        self.calls.append("validation")

    def on_validation_batch_end(self, run: Any, model: Any, o: Any, b: Any, i: int) -> None:
        self.calls.append(("validated", i))

    def on_validation_end(self, run: Any, model: Any) -> None:
        self.calls.append("validation end")

    def on_train_epoch_end(self, run: Any, model: Any) -> None:
        self.calls.append(("epoch end", run.epochs_done))

    def on_checkpoint_saved(self, run: Any, model: Any, path: str) -> None:
        self.calls.append(("saved", Path(path).name, (Path(path) / "model.safetensors").exists()))

    def teardown(self, run: Any, model: Any, stage: str) -> None:
        self.calls.append("teardown")


def test_hooks_come_at_the_same_places(tmp_path: Path) -> None:
    trace = Trace()
    train([trace], tmp_path)
    step = [("begin", 0), ("end", 0, 0, False), ("begin", 1), ("step", 1), ("end", 1, 1, False)]
    assert trace.calls[:7] == [("setup", None), ("epoch", 0, 0), *step]
    assert trace.calls[-12:] == [
        ("step", 3),
        ("end", 5, 3, True),
        ("log", "loss"),
        "validation",
        ("validated", 0),
        ("validated", 1),
        ("log", "eval_loss"),
        "validation end",
        ("epoch end", 1),
        ("saved", "checkpoint-3", True),
        ("log", "train_loss"),
        "teardown",
    ]


def test_early_stopping_stops_the_trainer(tmp_path: Path) -> None:
    stopper = EarlyStopping("eval_loss", patience=2, min_delta=100.0)
    trainer = train([stopper], tmp_path, 9)
    assert trainer.state.global_step == 3 * 3  # the first score is the best
    assert stopper.wait_count == 2


def test_timer_stops_the_trainer(tmp_path: Path) -> None:
    assert train([Timer(1e-6)], tmp_path, 9).state.global_step <= 1


class SaveAt(Callback):
    def on_after_optimizer_step(self, run: Any, model: Any, optimizer: Any) -> None:
        if run.global_step == 2:
            run.save_now("asked")


def test_a_wish_to_save_is_the_trainers(tmp_path: Path) -> None:
    train([SaveAt()], tmp_path, save_strategy="no", eval_strategy="no")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_the_average_is_evaluated_and_the_weights_are_saved(tmp_path: Path) -> None:
    live: list[torch.Tensor] = []
    evaluated: list[torch.Tensor] = []

    class Look(Callback):
        def on_after_optimizer_step(self, run: Any, model: Any, optimizer: Any) -> None:
            live.append(model.classifier.weight.detach().clone())

        def on_validation_batch_end(self, run: Any, model: Any, *args: Any) -> None:
            evaluated.append(model.classifier.weight.detach().clone())

    trainer = train([EMA(decay=0.5), Look()], tmp_path)
    average = live[0].clone()
    for weight in live[1:]:
        average = 0.5 * average + 0.5 * weight
    torch.testing.assert_close(evaluated[0], average)
    assert not torch.equal(live[-1], average)
    saved = type(trainer.model).from_pretrained(tmp_path / "checkpoint-3")
    assert torch.equal(saved.classifier.weight, live[-1])


def test_state_goes_on_from_the_trainers_checkpoint(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "constant"}
    whole, first, second = (EMA(decay=0.5) for _ in range(3))
    train([whole], tmp_path / "whole", 2, **options)
    train([first], tmp_path / "halves", 1, **options)
    trace = Trace()
    path = str(tmp_path / "halves" / "checkpoint-3")
    train([second, trace], tmp_path / "halves", 2, resume=path, **options)
    assert (second.updates, whole.updates) == (6, 6)
    torch.testing.assert_close(
        second.state_dict()["average"], whole.state_dict()["average"], rtol=0, atol=0
    )
    assert trace.calls[:3] == [("setup", "checkpoint-3"), ("epoch", 1, 1), ("begin", 0)]


def test_what_callbacks_log_comes_to_the_trainers_history(tmp_path: Path) -> None:
    trainer = train([LearningRateMonitor(), GradientNorm(), ProgressBar()], tmp_path)
    norms = [(e["step"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]
    assert [step for step, _ in norms] == [1, 2, 3, 3]  # and the Trainer's own
    assert min(norm for _, norm in norms) > 0
    rates = [entry["step"] for entry in trainer.state.log_history if "lr-AdamW/group1" in entry]
    assert rates == [1, 2, 3]
    assert any("loss" in entry for entry in trainer.state.log_history)


def test_without_the_trainer_it_is_in_the_history_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.add_callback(to_transformers(LearningRateMonitor()))
    trainer.train()
    rates = [entry["step"] for entry in trainer.state.log_history if "lr-AdamW/group1" in entry]
    assert rates == [1, 2, 3]


class Needs(Callback):
    def on_train_epoch_end(self, run: Any, model: Any) -> None:
        run.accelerator.gather_for_metrics(1)


def test_what_only_our_run_has_is_named(tmp_path: Path) -> None:
    text = "Needs needs run.accelerator.gather_for_metrics, which only accel.run has"
    with pytest.raises(NotInAPlainLoop, match=f"^{text}$"):
        train([Needs()], tmp_path)


def test_those_that_need_our_saves_are_refused() -> None:
    class Saves(Callback):
        def resume_root(self, run: Any) -> tuple[str, None]:
            return "c", None

    with pytest.raises(TypeError, match=r"Saves cannot run in transformers.Trainer: it saves"):
        to_transformers(Saves())
    with pytest.raises(TypeError, match=r"to_transformers\(Checkpoint\(...\), trainer=trainer\)"):
        to_transformers(Checkpoint("c"))


def test_a_tracker_gets_what_the_trainer_logs(tmp_path: Path) -> None:
    train(["jsonl", CSVTracker], tmp_path)
    path = tmp_path / "metrics.jsonl"
    rows = [row["values"] for row in read_jsonl(path) if row["step"] == 3]
    assert {"loss", "grad_norm", "eval_loss", "train_loss"} <= {
        name for row in rows for name in row
    }
    assert "loss" in (tmp_path / "metrics.csv").read_text().splitlines()[0]
    train(["jsonl"], tmp_path, 2, resume=str(tmp_path / "checkpoint-3"))
    assert [row["step"] for row in read_jsonl(path)][-1] == 6
    records = [json.loads(line) for line in path.read_text().splitlines()]
    runs = [record for record in records if record["type"] == "run"]
    assert [run.get("resumed_step") for run in runs] == [None, 3]
    assert len({run["run_id"] for run in runs}) == 1
    assert any(r["type"] == "config" and "learning_rate" in json.dumps(r) for r in records)


class Backward(Callback):
    def on_after_backward(self, run: Any, model: Any) -> None:
        """Never."""


class Terminated(Callback):
    def on_after_optimizer_step(self, run: Any, model: Any, optimizer: Any) -> None:
        if run.global_step == 2:
            signal.raise_signal(signal.SIGTERM)


class EvaluatesNever(Callback):
    def on_validation_batch_end(self, run: Any, model: Any, o: Any, b: Any, i: int) -> None:
        raise AssertionError("the epoch is not over")


def test_a_signal_saves_and_ends_the_script(tmp_path: Path) -> None:
    saved: list[list[str]] = []
    preemption = Preemption(requeue=lambda run: saved.append([*map(str, tmp_path.iterdir())]))
    with pytest.raises(SystemExit, match="75"):
        train([Terminated(), EvaluatesNever(), preemption], tmp_path, 9)
    assert saved == [[str(tmp_path / "checkpoint-2")]]  # in the middle of the first epoch
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_hooks_without_a_place_are_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"Backward.on_after_backward is never called in trans"):
        to_transformers(Backward())
