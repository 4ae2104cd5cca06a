"""The training step on a CUDA device: waits, results, memory, logs and torch.compile."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import (
    Accelerator,
    TorchDynamoPlugin,
    find_executable_batch_size,
    release_memory,
)
from accel_callbacks.callbacks import DeviceStats, GradientNorm, NonFinite, Throughput
from loggers import read_jsonl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 256


def network(depth: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(depth)]
    return torch.nn.Sequential(*(module for pair in layers for module in pair))


@contextlib.contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    """Let torch find calls in the block in which the host waits for the device."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def counted_syncs() -> Iterator[list[str]]:
    """A list of the calls in the block in which the host waited for the device."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen, sync_mode("warn"):
        warnings.simplefilter("always")
        yield found
    texts = [(str(one.message), f"{one.filename}:{one.lineno}") for one in seen]
    found.extend(where for text, where in texts if "synchroniz" in text)


# --- waits -------------------------------------------------------------------------------------


def test_the_detector_of_this_file_finds_a_wait():
    value = torch.ones((), device="cuda")
    with counted_syncs() as found:
        float(value)
    assert len(found) == 1


def test_no_step_waits_for_the_device_with_callbacks_and_a_tracker(tmp_path):
    callbacks = [GradientNorm(), NonFinite(), Throughput()]
    accel = Accelerator(
        mixed_precision="bf16", log_with=["jsonl"], project_dir=tmp_path, callbacks=callbacks
    )
    data = DataLoader(torch.randn(400, WIDTH), 8, pin_memory=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accel.prepare(model, optimizer, data)
    with accel.run("waits"), contextlib.ExitStack() as stack:
        for index, batch in enumerate(loader):
            if index == 8:  # FLOPs are counted, memory is pinned and kernels are chosen by now
                stack.enter_context(sync_mode("error"))
            loss = model(batch).square().mean()
            accel.backward(loss)
            accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accel.log({"loss": loss})
            if index == 40:
                stack.close()
                break
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) >= 40


def fp16_steps(optimizer_of, *, plain: bool = False) -> list[list[str]]:
    """The waits of each step of fp16, without the first ones."""
    model, steps = network(), []
    x = torch.randn(8, WIDTH, device="cuda")
    if plain:
        model, scaler = model.cuda(), torch.amp.GradScaler("cuda")
        optimizer = optimizer_of(model)
    else:
        accel = Accelerator(mixed_precision="fp16")
        model, optimizer = accel.prepare(model, optimizer_of(model))
    for index in range(12):
        with counted_syncs() as found:
            if plain:
                with torch.autocast("cuda", torch.float16):
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                accel.backward(model(x).square().mean())
                optimizer.step()
            optimizer.zero_grad()
        if index >= 4:
            steps.append(found)
    if not plain:
        assert accel.current_run.global_step == 12 - skipped(accel)
    return steps


def skipped(accel: Accelerator) -> int:
    """How often the scale was halved, which is once for each step that was skipped."""
    scale = accel.precision.state_dict()["scale"]
    count = 0
    while scale * 2**count < 2.0**16:
        count += 1
    return count


def test_fp16_with_a_fused_optimizer_waits_as_often_as_plain_torch():
    def fused(model):
        return torch.optim.AdamW(model.parameters(), fused=True)

    assert fp16_steps(fused, plain=True) == [[]] * 8
    assert fp16_steps(fused) == [[]] * 8


# --- results -----------------------------------------------------------------------------------


def trained(precision: str, *, plain: bool) -> torch.Tensor:
    """The weights after some steps."""
    model, rows = network(), torch.randn(16, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    if not plain:
        accel = Accelerator(mixed_precision=precision)
        model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters()))
    else:
        model = model.cuda()
        optimizer = torch.optim.AdamW(model.parameters())
    enabled = precision == "bf16"
    for batch in rows.cuda():
        if plain:
            with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                output = model(batch)
            output.float().square().mean().backward()
        else:
            accel.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_weights_are_those_of_the_plain_loop_bit_by_bit(precision):
    assert torch.equal(trained(precision, plain=False), trained(precision, plain=True))


def one_compile_thread(monkeypatch) -> None:
    """Compile on this thread, so that the test leaves none."""
    from torch._inductor import config  # here, because the import is large

    monkeypatch.setattr(config, "compile_threads", 1)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_trains_as_the_plain_one(mode, monkeypatch):
    one_compile_thread(monkeypatch)
    plugin = TorchDynamoPlugin(backend="inductor", mode=mode)
    losses = []
    for options in ({}, {"dynamo_plugin": plugin}):
        accel, model = Accelerator(mixed_precision="bf16", **options), network()
        model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters()))
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2)).to(accel.device)
        seen = []
        for _ in range(8):
            loss = model(x).square().mean()
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        assert seen[-1] < seen[0]
        losses.append(seen)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_is_near_bf16_with_and_without_compile(compiled, monkeypatch):
    one_compile_thread(monkeypatch)
    pytest.importorskip("torchao.float8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device with fp8")
    losses = {}
    for precision in ("bf16", "fp8"):
        options = {"dynamo_backend": "inductor"} if compiled else {}
        accel, model = Accelerator(mixed_precision=precision, **options), network()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # fp8 that is not compiled is slow
            model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3)).to(accel.device)
        for _ in range(20):
            loss = (model(x) - x).square().mean()
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses[precision] = loss.item()
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.1)


# --- memory, the driver, logs ------------------------------------------------------------------


def test_the_search_for_a_batch_size_frees_what_an_attempt_took():
    gc.collect()
    torch.cuda.empty_cache()
    before, seen = torch.cuda.memory_allocated(), []

    @find_executable_batch_size(starting_batch_size=1024, reduce_batch_size_fn=lambda n: n // 2)
    def train(size: int) -> int:
        seen.append((size, torch.cuda.memory_allocated() - before))
        held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(size)]
        return len(held)

    found = train()
    assert found == seen[-1][0] < 1024
    assert [size for size, _ in seen] == [1024 >> n for n in range(len(seen))]
    assert max(taken for _, taken in seen) < 64 << 20
    release_memory()


def test_the_driver_answers_and_its_figures_are_logged(tmp_path):
    pytest.importorskip("pynvml")
    stats = DeviceStats(every_n_steps=5)
    accel = Accelerator(log_with=["jsonl"], project_dir=tmp_path, callbacks=[stats])
    model = network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    values = stats.read(accel.device)
    assert 0 <= values["device/utilization_percent"] <= 100
    assert values["device/temperature_c"] > 0
    x = torch.randn(8, WIDTH, device=accel.device)
    with accel.run("stats"):
        for _ in range(20):
            accel.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if stats._driver is not None and stats._driver._thread is not None:
                stats._driver._thread.join()
    rows = [row["values"] for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert [row for row in rows if "device/utilization_percent" in row]


def test_values_logged_on_a_side_stream_are_those_of_their_moment(tmp_path):
    accel = Accelerator(log_with=["jsonl"], project_dir=tmp_path)
    side, count = torch.cuda.Stream(), 2000
    with accel.run("streams"), torch.cuda.stream(side):
        value = torch.zeros((), device="cuda")
        for index in range(count):
            value.fill_(index)
            accel.log({"value": value}, step=index)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    logged = [(row["step"], row["values"]["value"]) for row in rows if "value" in row["values"]]
    assert logged == [(index, float(index)) for index in range(count)]
