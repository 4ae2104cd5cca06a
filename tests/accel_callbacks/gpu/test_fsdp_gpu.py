"""FSDP2 on GPUs: what overlap, pinned memory and NCCL do to it; -m gpu, where there are two.

Without GPUs the programs of the tests run on the CPU, as a rehearsal, if they are called by hand.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.accel_callbacks.gpu.test_nccl import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

START = """
import json, sys, torch
from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin
from tests.support.sharded import Network, loader, whole

def wide(depth, width=1024):
    layers = lambda: (torch.nn.Linear(width, width), torch.nn.ReLU())
    return torch.nn.Sequential(*(torch.nn.Sequential(*layers()) for _ in range(depth)))

def show(**values):
    print("result", json.dumps(values), flush=True)

options = json.loads(sys.argv[1])
sharded, precision = options.pop("sharded"), options.pop("precision", "no")
accel = Accelerator(
    cpu=not torch.cuda.is_available(),
    mixed_precision=precision,
    **({"fsdp_plugin": FullyShardedDataParallelPlugin(**options)} if sharded else {}),
)
"""

TRAIN = """
model = Network()
model, optimizer, batches = accel.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=0.01), loader(accel, 64)
)
losses, norms = [], []
for inputs, targets in batches:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accel.backward(loss)
    norms.append(float(accel.clip_grad_norm_(model.parameters(), 1.0)))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accel.reduce(loss.detach().float(), "mean")))
shards = [getattr(p, "to_local", lambda: p)() for p in accel.unwrap_model(model).parameters()]
show(
    losses=losses,
    norms=norms,
    devices=sorted({one.device.type for one in shards}),
    pinned=all(one.is_pinned() for one in shards if one.numel()),
)
accel.end_training()
"""

MEMORY = """
model = wide(32)
model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(3):
    accel.backward(model(torch.ones(4, 1024, device=accel.device)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
show(peak=peak, weights=sum(p.numel() for p in model.parameters()) * 4)
accel.end_training()
"""

SYNCS = """
model = wide(4)
model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
def step():
    accel.backward(model(torch.ones(4, 1024, device=accel.device)).float().square().mean())
    accel.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
for _ in range(3):
    step()
if torch.cuda.is_available():
    torch.cuda.set_sync_debug_mode("error")
step()
if torch.cuda.is_available():
    torch.cuda.set_sync_debug_mode("default")
show(done=True)
accel.end_training()
"""


FP8 = """
from torchao.float8 import Float8LinearConfig
from accel_callbacks import AORecipeKwargs

def trained(gather):
    config = Float8LinearConfig(emulate=not torch.cuda.is_available(), pad_inner_dim=True)
    recipe = AORecipeKwargs(config, enable_fsdp_float8_all_gather=gather)
    accel = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="fp8",
        fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=offload),
        kwargs_handlers=[recipe],
    )
    torch.manual_seed(0)
    model = wide(6, 256)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not offload)
    model, optimizer = accel.prepare(model, optimizer)
    for step in range(4):
        torch.manual_seed(2 * step + accel.process_index)
        accel.backward(model(torch.randn(32, 256, device=accel.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            model(torch.ones(16, 256, device=accel.device))
    accel.unwrap_model(model)  # which frees what the evaluation has left whole
    kinds = [type(one._local_tensor).__name__ for one in model.parameters()]
    return torch.cat([whole(one.to(accel.device)).flatten() for one in model.parameters()]), kinds

offload = options.get("cpu_offload", False)
(plain, _), (cast, kinds) = trained(False), trained(True)
finite = bool(cast.isfinite().all())
show(equal=torch.equal(plain, cast), finite=finite, cast=kinds.count("Float8Shard"))
accel.end_training()
"""


def results(code: str, world: int, **options: Any) -> list[dict[str, Any]]:
    """What each rank shows."""
    outcomes = run_ranks(START + code, json.dumps(options), world=world)
    for returncode, text in outcomes:
        assert returncode == 0, text
    lines = [line for _, text in outcomes for line in text.splitlines() if "result {" in line]
    return [json.loads(line.partition("result ")[2]) for line in lines]


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_two_gpus_train_as_one_does(precision: str, offload: bool) -> None:
    (alone,) = results(TRAIN, 1, sharded=False, precision=precision)
    tolerance = {"no": 1e-4, "bf16": 0.05, "fp16": 0.01}[precision]
    for found in results(TRAIN, 2, sharded=True, precision=precision, cpu_offload=offload):
        assert found["losses"] == pytest.approx(alone["losses"], rel=tolerance)
        assert found["norms"] == pytest.approx(alone["norms"], rel=tolerance)
        assert found["devices"] == (["cpu"] if offload else ["cuda"])
        assert found["pinned"] is offload


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs CUDA devices with fp8",
)
@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_weights_that_are_gathered_in_fp8_are_the_same_to_the_bit(offload: bool) -> None:
    pytest.importorskip("torchao.float8")
    expected = {"equal": True, "finite": True, "cast": 4}
    assert results(FP8, 2, sharded=True, cpu_offload=offload) == [expected] * 2


def test_the_peak_of_the_memory_is_that_of_shards() -> None:
    (replica, _), (shard, _) = (
        results(MEMORY, 2, sharded=sharded, precision="no") for sharded in (False, True)
    )
    # Weights, gradients and two states, each whole or halved, and some units in between.
    assert replica["peak"] > 4 * replica["weights"]
    assert shard["peak"] < 3 * shard["weights"]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_steady_step_does_not_wait_for_the_device(precision: str) -> None:
    assert results(SYNCS, 2, sharded=True, precision=precision) == [{"done": True}] * 2
