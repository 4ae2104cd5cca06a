"""Resuming with other objects, weights without a config, and metrics in the wrong direction."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin, ResumeError
from accel_callbacks.callbacks import EMA, Checkpoint, EarlyStopping
from accel_callbacks.cli.main import main
from tests.support.bound import BOUND
from tests.support.pool import Pool

SGD = torch.optim.SGD
AdamW = torch.optim.AdamW
StepLR = torch.optim.lr_scheduler.StepLR


@pytest.fixture
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- another optimizer or scheduler -----------------------------------------------------------


def prepared(
    optimizer: Any = AdamW,
    scheduler: Any = None,
    *,
    width: int = 4,
    step: bool = True,
    **options: Any,
) -> Accelerator:
    torch.manual_seed(0)
    accel = Accelerator(cpu=True, **options)
    model = torch.nn.Sequential(torch.nn.Linear(4, width))
    made = [optimizer(model.parameters(), lr=0.1)]
    made += [] if scheduler is None else [scheduler(made[0])]
    model, *made = accel.prepare(model, *made)
    if step:
        accel.backward(model(torch.ones(2, 4)).square().mean())
        for stepped in made:
            stepped.step()
    return accel


def step_lr(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 2)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)


class Lion(torch.optim.Optimizer):
    """The options that AdamW has too, and another state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


class NamedAdamW(AdamW):
    """The same algorithm under another name."""


def digest(accel: Accelerator) -> list:
    return [
        *(w.clone() for model in accel.bare_models for w in model.state_dict().values()),
        *(group["lr"] for optimizer in accel.optimizers for group in optimizer.param_groups),
        *(scheduler.state_dict() for scheduler in accel.training_state.schedulers),
    ]


def unchanged(before: list, after: list) -> bool:
    return all(
        torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new
        for old, new in zip(before, after, strict=True)
    )


@pytest.mark.parametrize(
    ("saved", "loaded", "classes", "options"),
    [
        (SGD, AdamW, "AdamW, and the checkpoint's is SGD", "not saved: betas, eps; saved in vain"),
        (AdamW, SGD, "SGD, and the checkpoint's is AdamW", "not saved: dampening, momentum"),
        (AdamW, Lion, "Lion, and the checkpoint's is AdamW", "saved in vain: eps"),
    ],
)
def test_another_optimizer_is_refused_before_anything_changes(
    tmp_path: Path, saved: Any, loaded: Any, classes: str, options: str
) -> None:
    path = prepared(saved).save_state(tmp_path / "c")
    accel = prepared(loaded)
    before = digest(accel)
    with pytest.raises(ResumeError) as error:
        accel.load_state(path)
    text = str(error.value)
    assert text.startswith(f"{path}: optimizer 0 is {classes}, whose state does not fit")
    assert options in text
    assert "resume=False" in text
    assert unchanged(before, digest(accel))
    accel.load_state(path, only=["models", "run"])  # a way that the message names


def test_a_run_that_resumes_with_another_optimizer_is_refused(tmp_path: Path) -> None:
    def train(optimizer: Any, **options: Any) -> str | None:
        accel = prepared(optimizer, step=False, project_dir=str(tmp_path), callbacks=[Checkpoint()])
        with accel.run("r", **options) as run:
            for _ in run.epochs(2):
                pass
        return run.resumed_from

    assert train(AdamW) is None
    assert train(AdamW) is not None
    with pytest.raises(ResumeError, match=r"step-\d+: optimizer 0 is SGD"):
        train(SGD)
    assert train(SGD, resume=False) is None  # a way that the message names


def without_classes(path: str, target: Path) -> str:
    """A checkpoint as before classes were saved."""
    checkpoint = checkpoint_io.load(path)
    state = {name: value for name, value in checkpoint.state.items() if name != "classes"}
    checkpoint_io.save(str(target), state, local_state=checkpoint.local_state)
    return str(target)


def test_an_old_checkpoint_is_compared_by_the_options_of_its_groups(tmp_path: Path) -> None:
    path = without_classes(prepared(AdamW).save_state(tmp_path / "new"), tmp_path / "old")
    with pytest.raises(ResumeError, match=r"SGD, and the checkpoint's is another class.*momentum"):
        prepared(SGD).load_state(path)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("scheduler", [None, one_cycle])
def test_an_old_checkpoint_of_the_same_classes_loads_without_a_word(
    tmp_path: Path, scheduler: Any
) -> None:
    path = without_classes(prepared(AdamW, scheduler).save_state(tmp_path / "n"), tmp_path / "o")
    assert prepared(AdamW, scheduler).load_state(path, strict=True) == path


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (AdamW, lambda p, lr: AdamW(p, lr, fused=True)),
        (SGD, lambda p, lr: SGD(p, lr, momentum=0.9, nesterov=True)),
        (NamedAdamW, type("NamedAdamW", (AdamW,), {"__module__": "train"})),
    ],
    ids=["fused", "other values", "moved class"],
)
def test_variants_of_one_class_load_without_a_word(tmp_path: Path, saved: Any, loaded: Any) -> None:
    path = prepared(saved).save_state(tmp_path / "c")
    assert prepared(loaded).load_state(path, strict=True) == path


def test_another_class_with_the_same_options_loads_with_a_warning(tmp_path: Path) -> None:
    path = prepared(AdamW).save_state(tmp_path / "c")
    with pytest.warns(UserWarning, match="is NamedAdamW, and the checkpoint's is AdamW, whose opt"):
        prepared(NamedAdamW).load_state(path)
    with pytest.raises(ResumeError, match="strict=False"):
        prepared(NamedAdamW).load_state(path, strict=True)


def test_another_scheduler_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = prepared(SGD, step_lr).save_state(tmp_path / "c")
    accel = prepared(SGD, cosine)
    before = digest(accel)
    with pytest.raises(ResumeError) as error:
        accel.load_state(path)
    text = str(error.value)
    assert f"{path}: scheduler 0 is CosineAnnealingLR, and the checkpoint's is StepLR" in text
    assert "not saved: T_max, eta_min; saved in vain: gamma, step_size" in text
    assert unchanged(before, digest(accel))


@pytest.mark.usefixtures("silent")
def test_the_same_scheduler_with_other_options_loads_without_a_word(tmp_path: Path) -> None:
    path = prepared(SGD, step_lr).save_state(tmp_path / "c")
    assert prepared(SGD, lambda o: StepLR(o, 7)).load_state(path, strict=True) == path


def test_weights_of_another_shape_are_refused_with_the_path_and_a_way(tmp_path: Path) -> None:
    path = prepared(SGD).save_state(tmp_path / "c")
    with pytest.raises(ResumeError) as error:
        prepared(SGD, width=3).load_state(path)
    text = str(error.value)
    assert text.startswith(f"{path}: '0.")
    assert "build the model as the run that saved it did, start afresh (resume=False" in text


def loads_another_optimizer(folder: str, name: str) -> list:
    options: dict[str, Any] = {"timeout": BOUND}
    if name == "fsdp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    path = prepared(AdamW, **options).save_state(folder)
    outcomes = []
    for optimizer in (AdamW, SGD):
        try:
            prepared(optimizer, **options).load_state(path, strict=True)
            outcomes.append("loaded")
        except ResumeError as error:
            outcomes.append(str(error).partition(", whose")[0])
    return outcomes


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_all_ranks_refuse_another_optimizer(pool: Pool, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "c")
    results = pool.run(loads_another_optimizer, path, name)
    refused = f"{path}: optimizer 0 is SGD, and the checkpoint's is AdamW"
    assert results == [["loaded", refused]] * 2


# --- the configuration of a transformers model ------------------------------------------------


@pytest.fixture
def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8, eos_token_id=1, bos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def merge(*words: Any) -> int:
    return main(["merge-weights", *map(str, words)])


def opens(folder: Path, model: torch.nn.Module) -> bool:
    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(folder)
    here = model.state_dict()
    return all(torch.equal(value, here[name]) for name, value in opened.state_dict().items())


def test_merged_weights_of_a_transformers_model_open_with_from_pretrained(
    tmp_path: Path, gpt2: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    accel = Accelerator(cpu=True)
    accel.prepare(gpt2)
    path = accel.save_state(tmp_path / "c")
    assert merge(path, tmp_path / "m") == 0
    out, err = capsys.readouterr()
    assert "model.safetensors, config.json, generation_config.json" in out
    assert err == ""
    assert json.loads((tmp_path / "m/config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]
    assert opens(tmp_path / "m", gpt2)


@pytest.mark.parametrize("place", ["project", "given", "nowhere"])
def test_a_configuration_is_found_around_a_checkpoint_or_named(
    tmp_path: Path, gpt2: Any, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    source, model = tmp_path / "run/checkpoints/1", tmp_path / "model"
    checkpoint_io.save(str(source), {"models": {"0": gpt2.state_dict()}})
    (tmp_path / "run/config.json").write_text('{"lr": 0.1}')  # no model's
    if place != "nowhere":
        gpt2.config.save_pretrained(tmp_path / "run" if place == "project" else model)
        (tmp_path / "run/vocab.json").write_text("{}")
    words = ["--config", model / "config.json"] if place == "given" else []
    assert merge(source, tmp_path / "m", *words) == 0
    err = capsys.readouterr().err
    assert ("give --config PATH" in err) == (place == "nowhere")
    assert (tmp_path / "m/vocab.json").exists() == (place == "project")
    assert place == "nowhere" or opens(tmp_path / "m", gpt2)


def test_a_config_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint_io.save(str(tmp_path / "c"), {"models": {"0": {"w": torch.ones(1)}}})
    assert merge(tmp_path / "c", tmp_path / "m", "--config", tmp_path) != 0
    assert "there is no config.json of transformers" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_merged_weights_of_a_plain_model_need_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge(prepared().save_state(tmp_path / "c"), tmp_path / "m") == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["model.safetensors"]


def test_ls_promises_no_more_than_it_has_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared().save_state(tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.endswith(" complete")
    assert main(["ckpt", "verify", str(tmp_path)]) == 1


# --- what callbacks watch ---------------------------------------------------------------------


@pytest.mark.parametrize("callback", [EarlyStopping, lambda m, **k: Checkpoint(monitor=m, **k)])
@pytest.mark.parametrize("name", ["val/accuracy", "val_acc", "f1", "mAP@50", "val/R2", "top5_acc5"])
def test_a_metric_that_grows_needs_a_mode(callback: Any, name: str) -> None:
    with pytest.warns(UserWarning, match='because no mode was given: pass mode="max"'):
        assert callback(name).monitor.mode == "min"


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("callback", [EarlyStopping, lambda m, **k: Checkpoint(monitor=m, **k)])
def test_a_mode_or_a_metric_that_falls_needs_no_word(callback: Any) -> None:
    callback("val/accuracy", mode="max")
    callback("val/accuracy", mode="min")
    for name in ("val/loss", "1-acc", "acc_loss", "f1_error", "accumulated", "fid_score", "wer"):
        callback(name)


def logs(folder: Path, monitor: str, values: dict[int, dict[str, float]]) -> Checkpoint:
    saver = Checkpoint(str(folder), monitor=monitor)
    accel = Accelerator(cpu=True, callbacks=[saver])
    _, data = accel.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(range(2)))
    with accel.run("r") as run:
        for epoch in run.epochs(3):
            for _ in data:
                pass
            accel.log(values.get(epoch, {"train/loss": 1.0}))
    return saver


@pytest.mark.parametrize("name", ["val_loss", "other"])
def test_a_monitored_metric_that_is_never_logged(tmp_path: Path, name: str) -> None:
    with pytest.warns(UserWarning, match="watches") as caught:
        saver = logs(tmp_path, name, {epoch: {"val/loss": 1.0} for epoch in range(3)})
    texts = [str(warning.message) for warning in caught if "watches" in str(warning.message)]
    assert len(texts) == 1
    assert texts[0].startswith(f"Checkpoint watches {name!r}, but ")
    assert ("Did you mean 'val/loss'" in texts[0]) == (name == "val_loss")
    assert saver.best_path is None


@pytest.mark.usefixtures("silent")
def test_a_metric_of_every_third_epoch_needs_no_word(tmp_path: Path) -> None:
    assert logs(tmp_path, "val/loss", {2: {"val/loss": 1.0}}).best_path is not None
    logs(tmp_path, "val/loss", {})  # it resumes the finished run, and logs nothing


@pytest.mark.parametrize(
    ("options", "watched", "told"),
    [
        ({"decay": 0.999}, True, True),
        ({"decay": 0.999}, False, False),
        ({"decay": 0.5}, True, False),
        ({"decay": 0.999, "warmup": True}, True, False),
        ({"decay": 0.999, "evaluate_with_average": False}, True, False),
    ],
)
def test_an_average_that_lags_behind_what_is_watched(
    capsys: pytest.CaptureFixture[str], options: Any, watched: bool, told: bool
) -> None:
    watchers = [EarlyStopping("val/loss", patience=9)] if watched else []
    accel = Accelerator(cpu=True, callbacks=[EMA(**options), *watchers])
    model = torch.nn.Linear(2, 1)
    model, optimizer, data = accel.prepare(
        model, SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(torch.ones(5, 2))
    )
    with accel.run("r") as run:
        for _ in run.epochs(2):
            for batch in data:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
            with accel.evaluate(model):
                accel.log({"val/loss": 1.0})
    text = "EarlyStopping sees evaluations of the EMA, whose decay=0.999 reaches back 1000 steps: "
    assert capsys.readouterr().err.count(f"{text}after 5, 100% of it") == told
