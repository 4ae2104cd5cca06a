"""TorchScript modules, and a child with the name that torch.compile gives, train as in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import (
    Accelerator,
    TorchDynamoPlugin,
    apply_activation_checkpointing,
    cpu_offload,
)
from accel_callbacks.callbacks import EMA, summarize
from checkpoint_io import load_model


class Named(torch.nn.Module):
    """A model with a child of the name that torch.compile gives to the module inside."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = torch.nn.Linear(4, 8)
        self.out = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self._orig_mod(x))


def layers() -> torch.nn.Module:
    first = torch.nn.Linear(4, 8, bias=False)
    norm = torch.nn.BatchNorm1d(8)
    return torch.nn.Sequential(first, norm, torch.nn.Tanh(), torch.nn.Linear(8, 2))


def traced() -> torch.nn.Module:
    # Without a norm, whose mode a trace fixes.
    first, second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
    return torch.jit.trace(torch.nn.Sequential(first, torch.nn.Tanh(), second), torch.zeros(2, 4))


def recursive() -> torch.nn.Module:
    return torch.jit.script(torch.nn.Sequential(layers(), torch.nn.Sequential(torch.nn.ReLU())))


def with_scripted_child() -> torch.nn.Module:
    return torch.nn.Sequential(torch.jit.script(layers()), torch.nn.Linear(2, 2))


def compiled_named() -> torch.nn.Module:
    return torch.compile(Named(), backend="eager")


KINDS = {
    "scripted": lambda: torch.jit.script(layers()),
    "traced": traced,
    "recursive": recursive,
    "scripted_child": with_scripted_child,
    "named": Named,
    "scripted_named": lambda: torch.jit.script(Named()),
    "compiled_named": compiled_named,
}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]()


def train(kind: str, accel: Accelerator | None = None) -> tuple[torch.nn.Module, list]:
    """Return a model after three steps, and its tensors."""
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    if accel is not None:
        model, optimizer = accel.prepare(model, optimizer)
    for _ in range(3):
        loss = model(X).pow(2).sum()
        loss.backward() if accel is None else accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model, [tensor.clone() for tensor in model.state_dict().values()]


def equal(some: list, others: list) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_without_prepare(kind):
    _, plain = train(kind)
    _, prepared = train(kind, Accelerator(cpu=True))
    # TorchScript optimizes a graph after its first calls, in whichever model these were.
    torch.testing.assert_close(prepared, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_in_bf16_and_is_unwrapped_to_fp32(kind):
    accel = Accelerator(cpu=True, mixed_precision="bf16")
    model = accel.prepare(build(kind)).eval()
    reference = build(kind).eval()
    assert not torch.equal(model(X), reference(X))
    assert torch.allclose(model(X), reference(X), atol=0.05)
    assert torch.equal(accel.unwrap_model(model, keep_fp32_wrapper=False)(X), reference(X))


@pytest.mark.parametrize("kind", KINDS)
def test_its_state_and_weights_are_saved_and_loaded(kind, tmp_path: Path):
    accel = Accelerator(cpu=True, project_dir=tmp_path)
    model, tensors = train(kind, accel)
    saved = accel.save_state()
    accel.save_model(model, tmp_path / "weights")
    other = Accelerator(cpu=True, project_dir=tmp_path / "other")
    fresh = other.prepare(build(kind))
    optimizer = other.prepare(torch.optim.AdamW(fresh.parameters(), 0.1))
    assert not equal(tensors, list(fresh.state_dict().values()))
    other.load_state(saved)
    assert equal(tensors, list(fresh.state_dict().values()))
    assert len(optimizer.state) == len(list(fresh.parameters()))
    bare = build(kind)
    load_model(bare, tmp_path / "weights")
    assert equal(tensors, list(bare.state_dict().values()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_with_an_evaluation_goes_on_in_the_middle_of_an_epoch(kind, tmp_path: Path):
    def fit(folder: Path, stop: int | None = None, start: str | None = None) -> list:
        accel = Accelerator(cpu=True, project_dir=folder, callbacks=[EMA()])
        model = build(kind)
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(32, 4))
        model, optimizer, loader, held_out = accel.prepare(
            model,
            torch.optim.AdamW(model.parameters(), 0.01),
            DataLoader(data, batch_size=4, shuffle=True),
            DataLoader(data, batch_size=4),
        )
        if start is not None:
            accel.load_state(start)
        for step, (x,) in enumerate(loader, start=1):
            accel.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == stop:
                return [accel.save_state()]
        model.eval()
        with torch.no_grad():
            for (x,) in held_out:
                model(x)
        return list(model.state_dict().values())

    [saved] = fit(tmp_path / "a", stop=3)
    torch.testing.assert_close(fit(tmp_path / "a", start=saved), fit(tmp_path / "b"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_summary_with_an_example_counts_its_flops(kind):
    assert "FLOPs of one forward pass" in str(summarize(build(kind), example=X))


@pytest.mark.parametrize("kind", ["scripted", "traced", "recursive"])
@pytest.mark.parametrize("regional", [False, True])
def test_one_sentence_refuses_to_compile_it(kind, regional):
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    with pytest.raises(ValueError, match=r"torch\.compile: .* before torch\.jit\.script or"):
        Accelerator(cpu=True, dynamo_plugin=plugin).prepare(build(kind))


def blocks() -> torch.nn.Module:
    """Return a model that repeats TorchScript modules."""
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    return torch.nn.Sequential(*(torch.jit.script(block) for _ in range(2)))


def test_regional_compilation_compiles_the_rest_of_a_model():
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(blocks())
    assert torch.equal(model(X), blocks()(X))


def test_blocks_are_not_computed_again():
    model = blocks()
    with pytest.raises(ValueError, match=r"activation checkpointing: .* before torch\.jit"):
        apply_activation_checkpointing(model)
    assert torch.equal(model(X), blocks()(X))


@pytest.mark.parametrize("kind", ["scripted", "traced", "scripted_child"])
def test_its_weights_are_not_offloaded(kind):
    model = build(kind).eval()
    with pytest.raises(ValueError, match=r"offload: .* before torch\.jit"):
        cpu_offload(model, torch.device("cpu"))
    assert torch.equal(model(X), build(kind).eval()(X))
