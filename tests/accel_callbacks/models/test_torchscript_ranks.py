"""TorchScript modules on two processes: averaged by DDP, refused where layers would be cut."""

from __future__ import annotations

import pytest
import torch

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from tests.accel_callbacks.models.test_torchscript import KINDS, X, build
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


class Coder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.encode(x) * 2

    def encode(self, x):
        return self.inside(x)


class ScriptedCoder(Coder):
    @torch.jit.export
    def encode(self, x):
        return self.inside(x)

    @torch.jit.export
    def distance(self, x, y):
        return (x - y).pow(2).sum()


def train_a_share(kind: str) -> list[list[float]]:
    """Train on this rank's half of the batch; return the parameters as lists."""
    accel = Accelerator(cpu=True, timeout=BOUND)
    model = build(kind).eval()  # the statistics of a batch are those of a half
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(3):
        accel.backward(model(X.chunk(2)[accel.process_index]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_halves_train_what_the_whole_batch_does(pool, kind):
    model = build(kind).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(X).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    first, second = pool.run(train_a_share, kind)
    assert first == second
    torch.testing.assert_close(first, whole, rtol=1e-5, atol=1e-6)


def call_methods(traces: bool) -> tuple:
    accel = Accelerator(cpu=True, timeout=BOUND)
    share = X.chunk(2)[accel.process_index]
    if traces:
        coder = torch.jit.trace_module(Coder(), {"forward": share, "encode": share})
    else:
        coder = torch.jit.script(ScriptedCoder())
    marked = accel.prepare(coder, forward_methods=["encode"])
    encoded = marked.encode(share)
    accel.backward(encoded.sum())
    gradient = marked.module.inside.weight.grad.tolist()
    bare = accel.prepare(torch.jit.script(ScriptedCoder()))
    with torch.no_grad():
        bare.encode(share)
    loss = bare.distance(bare(share), torch.zeros(3, 2)).item()
    try:
        bare.encode(share)
    except RuntimeError as error:
        return encoded.tolist(), gradient, loss, str(error)
    return encoded.tolist(), gradient, loss, None


@pytest.mark.parametrize("traces", [False, True])
def test_a_marked_method_is_averaged_and_another_refused(pool, traces):
    results = pool.run(call_methods, traces)
    reference = Coder()
    reference.encode(X).sum().backward()
    for rank, (encoded, gradient, _, message) in enumerate(results):
        share = X.chunk(2)[rank]
        torch.testing.assert_close(torch.tensor(encoded), reference.encode(share))
        torch.testing.assert_close(torch.tensor(gradient), reference.inside.weight.grad / 2)
        assert "forward_methods=['encode']" in message


def prepare_cut(kind: str, engine: str) -> None:
    options = {
        "fsdp": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        "tensor": {"parallelism_config": ParallelismConfig(tp_size=2)},
        "pipeline": {"parallelism_config": ParallelismConfig(pp_size=2)},
    }[engine]
    accel = Accelerator(cpu=True, timeout=BOUND, **options)
    if engine == "pipeline":
        accel.prepare_pipeline(build(kind), split_points=["1"], loss_fn=torch.nn.MSELoss())
    else:
        accel.prepare(build(kind))


@pytest.mark.parametrize("engine", ["fsdp", "tensor", "pipeline"])
@pytest.mark.parametrize("kind", ["scripted", "traced", "scripted_child"])
def test_one_sentence_refuses_to_cut_it(pool, kind, engine):
    for error, message, *_ in pool.outcomes(prepare_cut, kind, engine):
        assert error == "ValueError"
        assert "before torch.jit.script or torch.jit.trace" in message


def shard_around() -> list[float]:
    """Train a model under FSDP whose scripted part has no weights, or is ignored."""
    torch.manual_seed(0)
    scripted = torch.jit.script(torch.nn.Linear(4, 4))
    model = torch.nn.Sequential(scripted, torch.jit.script(torch.nn.ReLU()), torch.nn.Linear(4, 2))
    plugin = FullyShardedDataParallelPlugin(ignored_modules=["0"])
    accel = Accelerator(cpu=True, timeout=BOUND, fsdp_plugin=plugin)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accel.backward(model(X.chunk(2)[accel.process_index]).sum())
    optimizer.step()
    return scripted.weight.flatten().tolist()


def test_parts_that_are_not_sharded_may_be_scripted(pool):
    first, second = pool.run(shard_around)
    assert first == second
