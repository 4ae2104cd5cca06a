"""ZeRO 0 to 3 train as DistributedDataParallel does, under the calls of a plain loop."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

from accel_callbacks import Accelerator, DeepSpeedPlugin, DistributedType, LocalSGD
from accel_callbacks.callbacks import Freeze, GradientNorm
from accel_callbacks.engines.deepspeed.optimizer import EngineOptimizer
from accel_callbacks.utils import DummyOptim, DummyScheduler, get_active_deepspeed_plugin
from tests.deepspeed.jobs import (
    difference,
    finish,
    net,
    plugin,
    prepared,
    run,
    train,
    weights,
)
from tests.support.rounding import ABSOLUTE, reordered

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

DTYPES = ("no", "bf16")


def _ddp(window: int, precision: str) -> tuple[Any, Any]:
    return run("ddp", window, mixed_precision=precision)


@pytest.fixture(scope="module")
def references(pool) -> dict[tuple[int, str], tuple[Any, Any]]:
    return {(w, p): pool.run(_ddp, w, p)[0] for w in (1, 4) for p in DTYPES}


def _engine(layout: str, window: int, precision: str) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="deepspeed|torch")
        return run(layout, window, mixed_precision=precision)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3"])
def test_parity_in_float32(pool, references, layout: str, window: int) -> None:
    norms, found = pool.run(_engine, layout, window, "no")[0]
    expected, wanted = references[window, "no"]
    assert norms == reordered(expected)
    # Six batches: with a window of four, the second one of an epoch has two.
    assert len(norms) == (12 if window == 1 else 4)
    assert difference(found, wanted) < ABSOLUTE


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_parity_in_bf16(pool, references, layout: str, window: int) -> None:
    norms, found = pool.run(_engine, layout, window, "bf16")[0]
    expected, wanted = references[window, "bf16"]
    assert norms == pytest.approx(expected, rel=0.03)
    assert difference(found, wanted) < 0.02
    # Float32, which the optimizer steps with: not all of them are numbers of bfloat16.
    values = torch.tensor(found["0.weight"])
    assert not torch.equal(values, values.bfloat16().float())


def _without_clipping(layout: str) -> Any:
    return run(layout, clip=None)[1]


def test_nothing_is_clipped_unless_the_loop_says_so(pool) -> None:
    """DeepSpeed clips to 1.0 where its configuration is silent."""
    wanted = pool.run(_without_clipping, "ddp")[0]
    assert difference(pool.run(_without_clipping, "zero2")[0], wanted) < ABSOLUTE


def _clipped_by_config(stage: int) -> Any:
    options = {"deepspeed_plugin": plugin(stage, gradient_clipping=0.05)}
    found = run(f"zero{stage}", clip=None, **options)[1]
    job = prepared(f"zero{stage}", **options)
    accel, model, _, loader, _ = job
    accel.backward(model(next(iter(loader))[0]).sum())
    with pytest.raises(ValueError, match=r"max_norm=1.0\) contradicts gradient_clipping=0.05"):
        accel.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="were left out"):
        accel.clip_grad_norm_(list(model.parameters())[:2], 0.05)
    finish(accel)
    return found


def test_a_norm_of_the_configuration_clips(pool, references) -> None:
    found = pool.run(_clipped_by_config, 2)[0]
    assert difference(found, references[1, "no"][1]) < ABSOLUTE


def _abandoned(layout: str, broken: str, path: str) -> Any:
    job = prepared(layout, 4)
    accel, model, optimizer, loader, _ = job
    accel.save_state(path)
    if broken:
        for inputs, _targets in loader:
            with accel.accumulate(model):
                accel.backward(1000 * model(inputs).sum())
                optimizer.step()
                optimizer.zero_grad()
            break
        assert accel.strategy.gradients.has_gradients(optimizer.optimizer)
    if broken == "load":
        accel.load_state(path)
        assert not accel.strategy.gradients.has_gradients(optimizer.optimizer)
    elif broken:
        # as if nothing had been drawn
        loader.set_epoch(0)
    norms = []
    for inputs in torch.ones(8, 2, 7):
        with accel.accumulate(model):
            accel.backward(model(inputs).square().sum())
            if accel.sync_gradients:
                norms.append(float(accel.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    found = weights(job)
    finish(accel)
    return norms, found


@pytest.mark.parametrize("broken", ["break", "load"])
@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3"])
def test_gradients_of_an_abandoned_window_are_dropped(
    pool, tmp_path: Path, layout: str, broken: str
) -> None:
    norms, found = pool.run(_abandoned, layout, broken, str(tmp_path / "a"))[0]
    expected, wanted = pool.run(_abandoned, layout, "", str(tmp_path / "b"))[0]
    assert norms == expected
    assert len(norms) == 2
    assert difference(found, wanted) == 0.0


def _normalized(layout: str) -> Any:
    job = prepared(layout, 2)
    accel, model, optimizer, loader, _ = job
    norms = []
    for number, (inputs, targets) in enumerate(loader):
        count = 1 + (number + accel.process_index) % len(inputs)
        with accel.accumulate(model):
            loss = (model(inputs[:count]) - targets[:count]).square().sum()
            accel.backward(loss, normalizer=count)
            if accel.sync_gradients:
                norms.append(float(accel.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
    found = weights(job)
    finish(accel)
    return norms, found


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3"])
def test_losses_of_sums_are_normalized(pool, layout: str) -> None:
    norms, found = pool.run(_normalized, layout)[0]
    expected, wanted = pool.run(_normalized, "ddp")[0]
    assert norms == reordered(expected)
    assert difference(found, wanted) < ABSOLUTE


def _clipped_values(layout: str) -> Any:
    job = prepared(layout)
    accel, model, optimizer, loader, _ = job
    for inputs, targets in loader:
        accel.backward((model(inputs) - targets).square().sum())
        accel.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    found = weights(job)
    finish(accel)
    return found


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_elements_are_clipped(pool, layout: str) -> None:
    found, wanted = (pool.run(_clipped_values, one)[0] for one in (layout, "ddp"))
    assert difference(found, wanted) < ABSOLUTE


def _mistakes() -> None:
    accel, model, optimizer, _, _ = prepared("zero2")
    assert accel.distributed_type is DistributedType.DEEPSPEED
    assert accel.state.deepspeed_plugin is accel.deepspeed_plugin
    assert get_active_deepspeed_plugin(accel.state).zero_stage == 2
    assert isinstance(accel.unwrap_model(model), torch.nn.Sequential)
    assert accel.prepare(optimizer) is optimizer
    assert accel.prepare(model) is model
    inputs = torch.ones(2, 7)
    accel.backward(model(inputs).sum())
    with pytest.raises(RuntimeError, match="wait for a step"):
        accel.backward(model(inputs).sum())
    optimizer.step()
    for refused, text in (
        (lambda: accel.prepare(net()), "has no optimizer in this call"),
        (lambda: accel.prepare(torch.optim.SGD(net().parameters(), 0.1)), "no parameter of a"),
        (lambda: optimizer.optimizer.add_param_group({}), "laid out"),
        (lambda: LocalSGD(accel, model, 2).__enter__(), "LocalSGD does not work"),
        (lambda: accel.join_uneven_inputs([model]).__enter__(), "join_uneven_inputs does not"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=text):
            refused()
    finish(accel)
    with pytest.raises(ValueError, match="two engines"):
        Accelerator(cpu=True, deepspeed_plugin=plugin(2), fsdp_plugin=_fsdp())
    with pytest.raises(ValueError, match="needs zero_stage=1"):
        prepared("zero0", mixed_precision="bf16")
    with pytest.raises(ValueError, match="fp8"):
        Accelerator(cpu=True, deepspeed_plugin=plugin(2), mixed_precision="fp8")


def _fsdp() -> Any:
    from accel_callbacks import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin()


def test_mistakes_are_errors_that_say_what_to_do(pool) -> None:
    pool.run(_mistakes)


def _dummies(configured: bool) -> Any:
    options: dict[str, Any] = {}
    if configured:
        options = {
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "warmup_min_lr": "auto",
                    "warmup_max_lr": "auto",
                    "warmup_num_steps": "auto",
                    "warmup_type": "linear",
                },
            },
        }
    accel = Accelerator(cpu=True, deepspeed_plugin=plugin(2, **options))
    model = net()
    if configured:
        optimizer: Any = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.1)
        schedule: Any = DummyScheduler(optimizer, warmup_num_steps=4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        factors = [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]  # DeepSpeed's counts from its first step
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])
    model, optimizer, schedule = accel.prepare(model, optimizer, schedule)
    assert isinstance(optimizer.optimizer, EngineOptimizer)
    rates = []
    for _ in range(5):
        accel.backward(model(torch.ones(2, 7)).square().sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    found = weights((accel, model))
    finish(accel)
    return rates, found


def test_optimizer_and_scheduler_of_the_configuration(pool) -> None:
    rates, found = pool.run(_dummies, True)[0]
    expected, wanted = pool.run(_dummies, False)[0]
    assert rates == pytest.approx(expected)
    assert rates[1] == pytest.approx(0.0025)
    assert difference(found, wanted) < ABSOLUTE


def _table() -> str:
    accel, model, *_ = prepared("zero2", 4, mixed_precision="bf16")
    text = accel.deepspeed_config(model).describe()
    finish(accel)
    return text


def test_a_table_says_where_each_value_is_from(pool) -> None:
    lines = pool.run(_table)[0].splitlines()
    assert "zero_optimization.stage=2 (file)" in lines
    assert "bf16.enabled=True (mixed_precision)" in lines
    assert any(line.startswith("gradient_accumulation_steps=1 (the loop's") for line in lines)


def _whole(layout: str) -> Any:
    job = prepared(layout)
    accel, model = job[:2]
    before = weights(job)
    with accel.full_parameters(model, writeback=True):
        bare = accel.unwrap_model(model)
        assert bare[0].weight.shape == (30, 7)
        if accel.is_main_process:
            bare[0].bias.data.fill_(2.0)
    after = weights(job)
    train(job)  # the optimizer steps from what was written
    trained = weights(job)
    finish(accel)
    return before, after, trained


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_parameters_are_changed_whole(pool, layout: str) -> None:
    before, after, trained = pool.run(_whole, layout)[0]
    assert after["0.bias"] == [2.0] * 30
    assert difference({**before, "0.bias": []}, {**after, "0.bias": []}) == 0.0
    assert all(abs(one - 2.0) < 0.5 for one in trained["0.bias"])


def _selected() -> list[int]:
    plugins = {"student": plugin(2), "teacher": plugin(3)}
    accel = Accelerator(cpu=True, deepspeed_plugins=plugins)
    stages = []
    for name in ("student", "teacher"):
        accel.state.select_deepspeed_plugin(name)
        model = net()
        model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        stages.append(model.zero_optimization_stage())
        accel.backward(model(torch.ones(2, 7)).sum())
        optimizer.step()
    with pytest.raises(ValueError, match=r"no DeepSpeedPlugin 'teecher'.*teacher"):
        accel.state.select_deepspeed_plugin("teecher")
    finish(accel)
    return stages


def _reference(built: str, precision: str) -> Any:
    job = prepared("zero3", mixed_precision=precision)
    accel, model = job[:2]
    with accel.init_module() if built == "sharded" else nullcontext():
        reference = net()
    if built == "evaluation":
        with accel.init_module():
            reference = net()
        reference = accel.prepare_model(reference, evaluation_mode=True)
    else:
        reference = accel.prepare(reference)
    inner = accel.unwrap_model(reference)
    assert all(parameter.numel() == 0 for parameter in inner.parameters())
    inputs = torch.ones(2, 7) + accel.process_index
    kept = weights((accel, reference))
    for _ in range(2):
        with torch.no_grad():
            wanted = reference(inputs)
        accel.backward((model(inputs) - wanted + 1).square().mean())
        job[2].step()
        job[2].zero_grad()
    assert weights((accel, reference)) == kept
    with torch.no_grad():
        assert torch.equal(inner(inputs), wanted)  # as generate() calls it
    with accel.full_parameters(reference):
        whole = inner[0].bias.tolist()
    found = weights(job), kept, wanted.tolist(), whole
    finish(accel)
    return found


def _two_models() -> Any:
    job = prepared("ddp")
    accel, model, optimizer = job[:3]
    reference = net()
    inputs = torch.ones(2, 7) + accel.process_index
    wanted = reference(inputs).detach()
    for _ in range(2):
        accel.backward((model(inputs) - wanted + 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    found = weights(job), {n: v.flatten().tolist() for n, v in reference.state_dict().items()}
    finish(accel)
    return *found, wanted.tolist(), reference[0].bias.tolist()


@pytest.mark.parametrize("built", ["whole", "sharded", "evaluation"])
def test_a_model_without_an_optimizer_is_sharded_in_stage_3(pool, built: str) -> None:
    trained, kept, outputs, bias = pool.run(_reference, built, "no")[0]
    wanted = pool.run(_two_models)[0]
    assert difference(trained, wanted[0]) < ABSOLUTE
    assert difference(kept, wanted[1]) == 0.0
    assert torch.allclose(torch.tensor(outputs), torch.tensor(wanted[2]))
    assert bias == wanted[3]


def test_a_model_without_an_optimizer_computes_in_bf16(pool) -> None:
    outputs = pool.run(_reference, "whole", "bf16")[0][2]
    wanted = pool.run(_two_models)[0][2]
    assert torch.allclose(torch.tensor(outputs), torch.tensor(wanted), atol=0.05)


def _reference_saved(layout: str, folder: str, load: bool) -> Any:
    job = prepared(layout)
    accel = job[0]
    torch.manual_seed(3 if load else 1)
    other = torch.nn.Linear(7, 3)
    options = {} if layout == "zero3" else {"evaluation_mode": True}
    reference = accel.prepare_model(other, **options)
    accel.load_state(folder) if load else accel.save_state(folder)
    accel.save_model(reference, f"{folder}-model")
    found = weights((accel, reference))
    finish(accel)
    return found


def test_a_model_without_an_optimizer_is_saved_and_loaded(pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    wanted = pool.run(_reference_saved, "zero3", folder, False)[0]
    for layout in ("zero3", "zero2"):
        assert pool.run(_reference_saved, layout, folder, True)[0] == wanted
    saved = load_file(f"{folder}-model/model.safetensors")
    assert {name: value.flatten().tolist() for name, value in saved.items()} == wanted


def test_several_models_have_a_plugin_each(pool) -> None:
    assert pool.run(_selected)[0] == [2, 3]


def _skipped(stage: int) -> Any:
    job = prepared(f"zero{stage}")
    accel, model, optimizer, _, schedule = job
    before, rate = weights(job), optimizer.param_groups[0]["lr"]
    for _ in range(2):
        # On one rank alone.
        factor = float("inf") if accel.process_index == 1 else 1.0
        accel.backward((model(torch.ones(2, 7)) * factor).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert accel.optimizer_step_was_skipped
    assert optimizer.param_groups[0]["lr"] == rate
    assert accel.current_run.global_step == 0
    after = weights(job)
    accel.backward(model(torch.ones(2, 7)).sum())
    optimizer.step()
    assert not accel.optimizer_step_was_skipped
    finish(accel)
    return before, after


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_skipped_step_moves_nothing(pool, stage: int) -> None:
    before, after = pool.run(_skipped, stage)[0]
    assert difference(before, after) == 0.0


def _blind_callbacks() -> None:
    job = prepared("zero2", callbacks=[Freeze({"0": 2})])
    with pytest.raises(RuntimeError, match="Freeze does not work"):
        train(job)
    finish(job[0])


def test_callbacks_that_would_see_nothing_are_refused(pool) -> None:
    pool.run(_blind_callbacks)


def _measured(layout: str) -> Any:
    norm = GradientNorm(every_n_steps=1)
    seen: list[float] = []
    job = prepared(layout, 2, callbacks=[norm])
    accel = job[0]
    log = accel.log
    accel.log = lambda values, **options: (
        seen.extend(float(v) for v in values.values()), log(values, **options)
    )  # fmt: skip
    norms = train(job)
    finish(accel)
    return norms, seen


@pytest.mark.parametrize("layout", ["zero0", "zero2", "zero3"])
def test_gradient_norms_are_logged(pool, layout: str) -> None:
    norms, seen = pool.run(_measured, layout)[0]
    assert len(seen) == 6
    assert seen == reordered(norms)


def _built_sharded() -> Any:
    accel = Accelerator(cpu=True, deepspeed_plugin=plugin(3))
    with accel.init_module():
        model = net()
    assert all(one.numel() == 0 for one in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    model, optimizer = accel.prepare(model, optimizer)
    for _ in range(3):
        accel.backward(model(torch.ones(2, 7)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    found = weights((accel, model))
    finish(accel)
    return found


def _built_whole() -> Any:
    accel = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    model, optimizer = accel.prepare(model, optimizer)
    for _ in range(3):
        accel.backward(model(torch.ones(2, 7)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    found = weights((accel, model))
    finish(accel)
    return found


def test_models_are_built_sharded(pool) -> None:
    found, wanted = pool.run(_built_sharded)[0], pool.run(_built_whole)[0]
    assert difference(found, wanted) < ABSOLUTE


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_one_process_trains(alone, layout: str) -> None:
    norms, found = alone.run(run, layout, 2)[0]
    expected, wanted = alone.run(run, "ddp", 2)[0]
    assert norms == reordered(expected)
    assert difference(found, wanted) < ABSOLUTE


def _offloaded(stage: int) -> Any:
    return run(f"zero{stage}", 4, deepspeed_plugin=plugin(stage, offload_optimizer="cpu"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_of_the_optimizer_in_host_memory(pool, references, stage: int) -> None:
    """With an optimizer of torch, which DeepSpeed refuses unless it is told."""
    norms, found = pool.run(_offloaded, stage)[0]
    expected, wanted = references[4, "no"]
    assert norms == reordered(expected)
    assert difference(found, wanted) < ABSOLUTE


def _gpt2(stage: int | None, folder: str) -> Any:
    import transformers

    automatic = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
        "auto",
    )
    options = {} if stage is None else {"zero_optimization": {"stage": stage, **automatic}}
    given = {"deepspeed_plugin": DeepSpeedPlugin(options)} if options else {}
    accel = Accelerator(cpu=True, **given)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model: Any = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    model, optimizer = accel.prepare(model, optimizer)
    ids = torch.arange(64).reshape(2, 32) % 61 + accel.process_index
    seen = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        accel.backward(loss)
        seen.append((float(loss.detach()), float(accel.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
        optimizer.zero_grad()
    found = weights((accel, model))
    accel.save_model(model, folder)
    bucket = None
    if stage is not None:
        bucket = accel.deepspeed_config(model).config["zero_optimization"]["reduce_bucket_size"]
    finish(accel)
    return seen, found, bucket


@pytest.mark.parametrize("stage", [2, 3])
def test_gpt2_of_transformers(pool, tmp_path: Path, stage: int) -> None:
    seen, found, bucket = pool.run(_gpt2, stage, str(tmp_path / "zero"))[0]
    expected, wanted, _ = pool.run(_gpt2, None, str(tmp_path / "ddp"))[0]
    for losses, others in zip(seen, expected, strict=True):
        assert losses == reordered(others)
    assert difference(found, wanted) < ABSOLUTE
    assert bucket == 32 * 32
    names = [load_file(tmp_path / one / "model.safetensors").keys() for one in ("zero", "ddp")]
    assert names[0] == names[1]  # the tied weight once
