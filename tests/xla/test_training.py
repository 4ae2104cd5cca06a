"""Training through torch_xla on its CPU device, one or several (CPU_NUM_DEVICES), against torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    set_seed,
)
from accel_callbacks.callbacks import EMA
from accel_callbacks.distributed.rng import capture_rng, restore_rng
from checkpoint_io import load
from tests.xla.training import STEPS, parts, train

DEVICES = int(os.environ.get("CPU_NUM_DEVICES", "1"))
ENGINES = ["replicated"] + (["sharded"] if DEVICES > 1 else [])
TRAINING = Path(__file__).with_name("training.py")


def options(engine: str) -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin()} if engine == "sharded" else {}


def on_cpu(**asked: Any) -> dict[str, Any]:
    """Train in a process of its own, which has no XLA device."""
    env = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    command = [sys.executable, str(TRAINING), json.dumps({**asked, "cpu": True})]
    found: dict[str, Any] = json.loads(subprocess.check_output(command, env=env, text=True))
    assert found["device"] == "cpu"
    return found


def plain(window: int = 1, precision: str = "no") -> dict[str, Any]:
    """Train in a loop of torch alone, on the CPU."""
    model, optimizer, loader = parts()
    losses, norms = [], []
    for _ in range(2):
        for index, (x, y) in enumerate(loader):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                output = model(x)
            loss = torch.nn.functional.mse_loss(output.float(), y)
            (loss / window).backward()
            losses.append(float(loss.detach()))
            if (index + 1) % window == 0:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
    weights = {name: one.tolist() for name, one in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def assert_alike(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-5) -> None:
    close = {"rtol": tolerance, "atol": tolerance}
    for key in ("losses", "norms"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), **close)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        here = torch.tensor(found["weights"][name])
        torch.testing.assert_close(here, torch.tensor(value), **close)


def sharding_of(tensor: torch.Tensor) -> str:
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor))


def compilations() -> int:
    from torch_xla.debug import metrics

    return int(metrics.counter_value("UncachedCompile") or 0)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_norms_and_weights_are_those_of_torch(engine: str, window: int) -> None:
    found = train(window, **options(engine))
    assert (found["device"], found["kind"]) == ("xla:0", "XLA")
    assert_alike(found, plain(window))


class Heads(torch.nn.Module):
    """A model of which a batch uses the heads that it names; `spare` is used by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleDict({n: torch.nn.Linear(8, 4) for n in ("a", "b", "spare")})

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        return sum(self.heads[name](x) for name in used)


def heads_of(accel: Accelerator | None) -> dict[str, list[float]]:
    """Train with other heads in each batch; return the weights."""
    model: Any = Heads()
    # Weight decay and momentum move a weight whose gradient is zero, and not one that has none.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.5)
    loader = parts()[2]
    if accel is not None:
        model, optimizer, loader = accel.prepare(model, optimizer, loader)
    for (x, y), used in zip(loader, ("a", "ab", "b", "b", "a", "ab", "b", "a"), strict=True):
        loss = torch.nn.functional.mse_loss(model(x, used), y)
        loss.backward() if accel is None else accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if accel is None else accel.get_state_dict(model)
    return {name: weight.flatten().tolist() for name, weight in state.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_may_use_different_parameters(engine: str) -> None:
    found, expected = heads_of(Accelerator(**options(engine))), heads_of(None)
    assert found == {name: pytest.approx(value, abs=2e-5) for name, value in expected.items()}


def test_a_model_that_is_cut_over_processes_is_refused() -> None:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    accel = Accelerator()
    model = XlaFullyShardedDataParallel(torch.nn.Linear(4, 4).to(accel.device))
    with pytest.raises(ValueError, match="pass the model without it"):
        accel.prepare(torch.nn.Sequential(model))


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_is_that_of_torch(engine: str) -> None:
    found, expected = train(precision="bf16", **options(engine)), plain(precision="bf16")
    assert_alike({**found, "weights": {}}, {**expected, "weights": {}}, 2e-2)
    assert found["losses"] != train()["losses"]


def test_bf16_casts_what_attention_gets() -> None:
    accel = Accelerator(mixed_precision="bf16")
    query, key, value = torch.randn(3, 2, 2, 4, 8).to(accel.device)
    with accel.autocast():
        outputs = F.scaled_dot_product_attention(query, key, value.bfloat16(), is_causal=True)
    assert outputs.dtype == torch.bfloat16
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(outputs.float().cpu(), exact.cpu(), atol=0.05)


@pytest.mark.parametrize("engine", ENGINES)
def test_callbacks_see_what_they_see_on_the_cpu(engine: str) -> None:
    found, expected = train(callbacks=True, **options(engine)), on_cpu(callbacks=True)
    assert_alike(found, expected)
    trained = torch.tensor(train(**options(engine))["weights"]["inner.weight"])
    average = torch.tensor(found["weights"]["inner.weight"])
    assert (average - trained).abs().max() > 1e-3


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_goes_on_with_cpu_and_back(tmp_path: Path, engine: str, window: int) -> None:
    begin, middle, whole = STEPS // 2 + 1, STEPS + 3, plain(window)
    own, theirs = str(tmp_path / "xla"), str(tmp_path / "cpu")
    first = train(window, save=own, stop=begin, **options(engine))
    second = on_cpu(window=window, load=own, save=theirs, stop=middle - begin)
    third = train(window, load=theirs, **options(engine))
    together = {key: first[key] + second[key] + third[key] for key in ("losses", "norms")} | {
        "weights": third["weights"]
    }
    assert_alike(together, whole)


def test_a_checkpoint_holds_tied_weights_once_and_host_tensors(tmp_path: Path) -> None:
    train(save=str(tmp_path / "c"), stop=1)
    content = load(str(tmp_path / "c"))
    weights = content.state["models"]["0"]
    assert weights["inner.weight"] is weights["tied.weight"]
    assert {one.device.type for one in weights.values()} == {"cpu"}
    assert content.manifest.aliases


def test_the_average_of_weights_is_in_the_checkpoint(tmp_path: Path) -> None:
    ema = EMA(decay=0.5)
    accel = Accelerator(callbacks=[ema])
    model, optimizer, loader = accel.prepare(*parts())
    with accel.run():
        for x, y in loader:
            accel.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        path = accel.save_state(str(tmp_path / "c"))
        saved = load(path).state["callbacks"]
        accel.load_state(path)
        accel.save_state(str(tmp_path / "again"))
    assert "EMA" in str(saved)
    torch.testing.assert_close(load(str(tmp_path / "again")).state["callbacks"], saved)


def test_parameters_stay_the_objects_that_they_are() -> None:
    accel = Accelerator()
    model, optimizer, _ = parts()
    model.inner.weight.marked = True
    before = list(model.parameters())
    model, optimizer = accel.prepare(model, optimizer)
    assert all(one is two for one, two in zip(before, model.parameters(), strict=True))
    assert model.inner.weight is model.tied.weight is optimizer.param_groups[0]["params"][0]
    assert model.inner.weight.device.type == "xla"
    assert model.inner.weight.marked
    frozen = accel.prepare_model(parts()[0], evaluation_mode=True)
    assert frozen.inner.weight is frozen.tied.weight
    assert frozen.mean.device.type == "xla"


def test_steps_of_one_shape_compile_once() -> None:
    accel = Accelerator()
    model, optimizer, loader = accel.prepare(*parts())
    counts = []
    for _ in range(2):
        for x, y in loader:
            accel.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            counts.append(compilations())
    assert counts[-1] == counts[3]
    assert counts[-1] - counts[0] <= 2


def test_a_last_batch_of_another_shape_is_told_once() -> None:
    accel = Accelerator()
    loader = accel.prepare(DataLoader(torch.ones(7, 8), 4))
    with pytest.warns(UserWarning, match="drop_last=True"):
        shapes = [len(batch) for batch in loader]
    assert shapes == [4, 3]
    other = accel.prepare(DataLoader(torch.ones(7, 8), 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [float(batch.sum()) for batch in other] == [16.0, 16.0, 16.0, 8.0]


def test_random_numbers_are_restored() -> None:
    device = Accelerator().device
    set_seed(3)
    state = capture_rng(device)
    first = torch.rand(3, device=device).cpu()
    restore_rng(state, device)
    assert torch.equal(torch.rand(3, device=device).cpu(), first)


def dropped_out(accel: Accelerator, folder: Path | None = None) -> torch.Tensor:
    """Return what dropout leaves in each of three batches; save before the last one."""
    loader = accel.prepare(DataLoader(torch.ones(12, 8), 4))
    layer = accel.prepare(torch.nn.Dropout(0.5))
    left = []
    for number, batch in enumerate(loader):
        if folder is not None and number == 2:
            accel.save_state(str(folder / "saved"))
        left.append(layer(batch).cpu())
    return torch.stack(left)


def test_a_seed_holds_for_the_device_and_a_save_draws_nothing(tmp_path: Path) -> None:
    accel = Accelerator()
    accel.prepare(torch.nn.Linear(2, 2))
    outcomes = []
    for folder in (None, None, tmp_path):
        set_seed(3)
        outcomes.append(dropped_out(accel, folder))
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])
    assert not torch.equal(outcomes[0][0], outcomes[0][1])


def test_embeddings_that_were_untied_before_are_told() -> None:
    class Config:
        tie_word_embeddings = True

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.tie_weights()

        def tie_weights(self) -> None:
            self.last.weight = self.first.weight

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.first

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.last

    accel = Accelerator()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accel.prepare(Tied())
    moved = Tied().to(accel.device)
    with pytest.warns(UserWarning, match="tie_weights"):
        accel.prepare(moved)


@pytest.mark.skipif(DEVICES == 1, reason="one device")
def test_parameters_and_states_are_cut_before_and_after_a_load(tmp_path: Path) -> None:
    accel = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model, optimizer, loader = accel.prepare(*parts())
    cut = f"devices=[{DEVICES},1]"

    def step() -> None:
        for x, y in loader:
            accel.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        for tensor in (model.inner.weight, optimizer.state[model.inner.weight]["exp_avg"]):
            assert cut in sharding_of(tensor)

    step()
    path = accel.save_state(str(tmp_path / "c"))
    accel.load_state(path)
    step()


@pytest.mark.skipif(DEVICES < 4, reason="four devices")
def test_a_mesh_cuts_parameters_on_some_devices() -> None:
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    found = train(parallelism_config=mesh)
    assert_alike(found, plain())
    accel = Accelerator(parallelism_config=mesh)
    model = accel.prepare(parts()[0])
    assert "devices=[2,1,2]" in sharding_of(model.inner.weight)


def _fp16() -> None:
    Accelerator(mixed_precision="fp16").prepare(parts()[0])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (_fp16, "use 'bf16'"),
        (
            lambda: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=True)),
            "cpu_offload=...",
        ),
        (
            lambda: Accelerator(parallelism_config=ParallelismConfig(tp_size=max(DEVICES, 2))),
            "does not go with XLA" if DEVICES > 1 else "arranges 2 ranks",
        ),
    ],
    ids=["fp16", "cpu_offload", "tp_size"],
)
def test_what_does_not_go_with_xla_says_so(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="one process computes on all devices"):
        Accelerator()


def test_the_cpu_can_be_asked_for() -> None:
    assert Accelerator(cpu=True).device.type == "cpu"
