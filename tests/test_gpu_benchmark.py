"""What benchmarks/gpu.py says of its rounds, and that it runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


BASE = [1000.0, 1010.0, 1005.0, 1008.0, 1002.0]


def test_a_verdict_needs_rounds_that_agree(benchmark: ModuleType) -> None:
    cases = {
        "reaches the aim of 0.99": [0.995, 0.996, 0.994, 0.995, 0.996],
        "MISSES the aim of 0.99": [0.95, 0.951, 0.952, 0.95, 0.949],
        "no verdict": [0.99, 0.90, 1.05, 0.97, 1.1],
    }
    for words, factors in cases.items():
        rates = [factor * base for factor, base in zip(factors, BASE, strict=True)]
        ratio = benchmark.Ratio(rates, BASE)
        assert ratio.verdict.startswith(words)
        assert ratio.is_sure is not words.startswith("no")
        assert "half of the rounds" in str(ratio)


def test_medians_that_say_something_else_are_no_verdict(benchmark: ModuleType) -> None:
    base = [1000.0, 1100.0, 1000.0, 1100.0, 1000.0]
    rates = [1000.0, 1100.0, 1000.0, 1100.0, 1100.0]
    ratio = benchmark.Ratio(rates, base)
    assert ratio.high - ratio.low <= benchmark.WIDE
    assert ratio.verdict.startswith("no verdict")


def test_the_model_has_the_size_of_gpt2_and_a_loss_of_chance(benchmark: ModuleType) -> None:
    with torch.device("meta"):
        count = sum(one.numel() for one in benchmark.GPT(benchmark.Size()).parameters())
    assert count == pytest.approx(124.5e6, rel=0.01)
    torch.manual_seed(0)
    loss = benchmark.GPT(benchmark.SMALL)(torch.randint(64, (2, 16)))
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), rel=0.05)


def test_the_contenders_train_the_same_weights(benchmark: ModuleType) -> None:
    setting = benchmark.Setting(torch.device("cpu"), benchmark.SMALL, steps=3)
    ends = []
    for make in (benchmark.plain, benchmark.ours):
        parts = type(setting).parts
        models = []

        def watched(self, parts=parts, models=models):
            made = parts(self)
            models.append(made[0])
            return made

        type(setting).parts = watched
        try:
            make(setting)(3)
        finally:
            type(setting).parts = parts
        ends.append(torch.cat([one.detach().flatten() for one in models[0].parameters()]))
    assert torch.equal(*ends)


def test_it_runs_without_a_gpu(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["gpu.py", "--device", "cpu", "--small", "--rounds", "2", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", words)
    benchmark.main()
    text = capsys.readouterr().out
    assert " plain " in text
    assert " ours " in text
    assert "tokens/s   ratio " in text
    assert "they need a CUDA device" in text
