"""Tokens a second of GPT-2 124M on a GPU, as a ratio to the plain loop, and what a step waits for.

    python benchmarks/gpu.py                            (one CUDA device; some minutes)
    python benchmarks/gpu.py --device cpu --small       (seconds, shows that the script runs)

The contenders train the same small GPT with random weights on random tokens, each with its own copy
of the weights, in one process and in rounds whose order is shuffled: the plain loop of torch, this
package, and Accelerate if it is installed. In fp8 they are this package and plain torch with
torchao, both compiled, where torchao is installed and the device has fp8.

The ratio is the median of the ratios within a round, so that a slow moment of the machine counts
for both sides, with the quartiles of these. It is to be 0.99 or more. Where half of the rounds
spread over more than a hundredth, or the ratio of the medians is further than half of that from it,
there is no verdict: take more --rounds, or more --steps.

Then, on a CUDA device: how often the host waits for it in a step, as torch's own detector
(``torch.cuda.set_sync_debug_mode``) counts, and the memory that torch has reserved after the second
and after the fortieth pass over a loader whose batches are copied ahead.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

AIM = 0.99
WIDE = 0.01  # spread of half of the rounds, of the ratio, above which nothing is decided
PASSES = 40
WARM_UP = 5  # steps of a contender before the first round

#: Trains a number of steps, without waiting for the device at the end.
Contender = Callable[[int], None]


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its batches."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304  # GPT-2's 50257, as a multiple of 64
    length: int = 1024
    batch: int = 8


SMALL = Size(layers=2, heads=2, width=32, vocabulary=64, length=16, batch=2)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm, self.norm_after = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attend = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.attend(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm_after(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 without dropout; the forward returns the loss of the next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Setting:
    """What all contenders of a comparison share."""

    device: torch.device
    size: Size
    steps: int
    compiled: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
        torch.manual_seed(0)
        size = self.size
        model = GPT(size).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        rows = torch.randint(size.vocabulary, (self.steps * size.batch, size.length))
        loader = DataLoader(TensorDataset(rows), size.batch, pin_memory=self.is_cuda)
        return model, optimizer, loader

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def batches(loader: Any, steps: int) -> Iterator[Any]:
    """Yield this many batches, of as many passes as they take."""
    left = steps
    while left > 0:
        for (batch,) in loader:
            yield batch
            left -= 1
            if left == 0:
                break


def _plain(setting: Setting, model: nn.Module, optimizer: Any, loader: Any) -> Contender:
    device, pinned = setting.device, setting.is_cuda
    forward = torch.compile(model) if setting.compiled else model

    def run(steps: int) -> None:
        for host in batches(loader, steps):
            batch = host.to(device, non_blocking=pinned)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = forward(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def plain(setting: Setting) -> Contender:
    return _plain(setting, *setting.parts())


def plain_fp8(setting: Setting) -> Contender:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model, optimizer, loader = setting.parts()
    names = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)][1:-1]
    convert_to_float8_training(
        model,
        module_filter_fn=lambda _, name: name in names,
        config=Float8LinearConfig(pad_inner_dim=True),
    )
    return _plain(setting, model, optimizer, loader)


def _prepared(accelerator: Any, setting: Setting) -> Contender:
    """The loop that Accelerate's scripts have, which is ours too."""
    model, optimizer, loader = accelerator.prepare(*setting.parts())

    def run(steps: int) -> None:
        for batch in batches(loader, steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return run


def _ours(setting: Setting, precision: str) -> Contender:
    from accel_callbacks import Accelerator

    options: dict[str, Any] = {"dynamo_backend": "inductor"} if setting.compiled else {}
    cpu = setting.device.type == "cpu"
    return _prepared(Accelerator(cpu=cpu, mixed_precision=precision, **options), setting)


def ours(setting: Setting) -> Contender:
    return _ours(setting, "bf16")


def ours_fp8(setting: Setting) -> Contender:
    return _ours(setting, "fp8")


def accelerate(setting: Setting) -> Contender:
    from accelerate import Accelerator

    options: dict[str, Any] = {"dynamo_backend": "inductor"} if setting.compiled else {}
    cpu = setting.device.type == "cpu"
    return _prepared(Accelerator(cpu=cpu, mixed_precision="bf16", **options), setting)


BF16 = (plain, ours, accelerate)
FP8 = (plain_fp8, ours_fp8)


def available(makers: Sequence[Callable[[Setting], Contender]], setting: Setting) -> dict:
    """Make the contenders that are installed; say why another is left out."""
    made = {}
    for make in makers:
        try:
            made[make.__name__] = make(setting)
        except ImportError as error:
            print(f"{make.__name__:12} left out: {error}")
    return made


def timed(run: Contender, setting: Setting) -> float:
    """Tokens a second."""
    gc.collect()
    setting.wait()
    started = time.perf_counter()
    run(setting.steps)
    setting.wait()
    seconds = time.perf_counter() - started
    return setting.steps * setting.size.batch * setting.size.length / seconds


def measure(
    contenders: Mapping[str, Contender], setting: Setting, rounds: int
) -> dict[str, list[float]]:
    """Tokens a second, for each contender and round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(min(WARM_UP, setting.steps))
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            rates[name].append(timed(contenders[name], setting))
    return rates


class Ratio:
    """The tokens a second of a contender, as a ratio to those of another one.

    Args:
        rates: of each round.
        base: of the other contender, in the same rounds.
    """

    def __init__(self, rates: Sequence[float], base: Sequence[float]) -> None:
        each = [rate / other for rate, other in zip(rates, base, strict=True)]
        self.low, self.median, self.high = statistics.quantiles(each, n=4, method="inclusive")
        self.of_medians = statistics.median(rates) / statistics.median(base)

    @property
    def is_sure(self) -> bool:
        """False if the rounds spread too far, or two ways to look at them disagree."""
        apart = abs(self.median - self.of_medians)
        return self.high - self.low <= WIDE and apart <= WIDE / 2

    @property
    def verdict(self) -> str:
        if not self.is_sure:
            return "no verdict: the rounds differ too much, take more --rounds or --steps"
        return f"{'reaches' if self.median >= AIM else 'MISSES'} the aim of {AIM}"

    def __str__(self) -> str:
        return f"{self.median:.4f}   half of the rounds {self.low:.4f} to {self.high:.4f}"


def print_rates(rates: Mapping[str, Sequence[float]], base: str) -> None:
    """Print the tokens a second of all, and their ratio to those of the plain loop."""
    for name, values in rates.items():
        line = f"    {name:12} {statistics.median(values):12,.0f} tokens/s"
        if name != base and base in rates:
            ratio = Ratio(values, rates[base])
            line += f"   ratio {ratio}"
            line += f"   {ratio.verdict}" if name.startswith("ours") else ""
        print(line)


def waits_of(run: Contender, setting: Setting, steps: int = 10) -> float:
    """How often the host waits for the device in a step, as torch's detector counts."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in seen) / steps


def reserved_after_passes(setting: Setting, megabytes: int = 16) -> tuple[int, int]:
    """MiB that torch has reserved after the second pass over a loader, and after the last."""
    from accel_callbacks import Accelerator

    rows = torch.zeros(4, megabytes << 18)
    loader = Accelerator().prepare(DataLoader(rows, 1, pin_memory=True))
    gc.collect()
    torch.cuda.empty_cache()
    seen = []
    for _ in range(PASSES):
        for batch in loader:
            batch.sum()
        setting.wait()
        seen.append(torch.cuda.memory_reserved() >> 20)
    return seen[1], seen[-1]


def compare(
    title: str,
    makers: Sequence[Callable[[Setting], Contender]],
    setting: Setting,
    rounds: int,
) -> None:
    """Measure contenders against the first of them, and count what a step of each waits for."""
    print(title)
    contenders = available(makers, setting)
    if makers[0].__name__ not in contenders:
        return
    print_rates(measure(contenders, setting, rounds), makers[0].__name__)
    if setting.is_cuda:
        for name, run in contenders.items():
            print(f"    {name:12} waits for the device {waits_of(run, setting):.2f} times a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--compile", action="store_true", help="compile all in bf16 too")
    parser.add_argument("--batch", type=int, help="sequences of a batch")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more, to show how much they differ")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --small shows that the script runs")
    size = SMALL if options.small else Size()
    if options.batch:
        size = Size(**{**vars(size), "batch": options.batch})
    setting = Setting(torch.device(options.device), size, options.steps, options.compile)
    device = torch.cuda.get_device_name() if setting.is_cuda else "CPU"
    count = sum(one.numel() for one in GPT(size).parameters())
    print(f"torch {torch.__version__}, {device}, {count / 1e6:.1f}M parameters, {size}")
    print(f"{options.rounds} rounds of {options.steps} steps")
    compare("bf16", BF16, setting, options.rounds)
    if not setting.is_cuda:
        print("fp8, waits and reserved memory: left out, they need a CUDA device")
        return
    if torch.cuda.get_device_capability() < (8, 9):
        print("fp8: left out, the device has none")
    else:
        compiled = Setting(setting.device, size, options.steps, compiled=True)
        compare("fp8, compiled", FP8, compiled, options.rounds)
    second, last = reserved_after_passes(setting)
    print(f"reserved after 2 passes over a loader {second} MiB, after {PASSES} {last} MiB")


if __name__ == "__main__":
    main()
