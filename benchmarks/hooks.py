"""Microseconds to dispatch one hook to 10 callbacks of which one has it, against Lightning.

    pip install "accel-callbacks[bench]"        (in an environment of its own)
    python benchmarks/hooks.py

Ours counts and times each call in the ledger, which is always on. The Trainer looks at each
callback and opens its profiler (here one that does nothing) around each call; `Fabric.call` looks
at the signature of each method. A row more is a hook that nobody has. Contenders run in rounds
whose order is shuffled, in one process. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import results

CALLBACKS = 10
HOOK = "on_train_batch_end"
ARGUMENTS: tuple[Any, ...] = (None, None, 0)  # outputs, batch, batch_idx

Contender = Callable[[int], None]


def family(base: type) -> list[Any]:
    """Ten callbacks; the last has the hook."""

    class Idle(base):  # type: ignore[misc, valid-type]
        def __init__(self, number: int) -> None:
            self.number = number

        @property
        def state_key(self) -> str:
            return f"{type(self).__name__}:{self.number}"

    class Busy(Idle):
        def on_train_batch_end(self, run, model, outputs, batch, batch_idx):  # type: ignore[no-untyped-def]
            pass

    return [*(Idle(number) for number in range(CALLBACKS - 1)), Busy(CALLBACKS)]


def bare() -> Contender:
    """Calling the one method by hand."""
    from accel_callbacks import Callback

    hook = family(Callback)[-1].on_train_batch_end

    def run(times: int) -> None:
        for _ in range(times):
            hook(None, None, *ARGUMENTS)

    return run


def ours() -> Contender:
    from accel_callbacks import Accelerator, Callback

    loop = Accelerator(cpu=True, callbacks=family(Callback)).loop

    def run(times: int) -> None:
        outputs, batch, index = ARGUMENTS
        for _ in range(times):
            for hook in loop.dispatch.hooks[HOOK]:
                hook(loop.run, loop.model, outputs, batch, index)

    return run


def ours_nobody() -> Contender:
    """A hook that no callback has."""
    from accel_callbacks import Accelerator, Callback

    loop = Accelerator(cpu=True, callbacks=family(Callback)).loop

    def run(times: int) -> None:
        for _ in range(times):
            for hook in loop.dispatch.hooks["on_train_batch_start"]:
                hook(loop.run, loop.model, None, 0)

    return run


def trainer() -> Contender:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer import call

    trainer = Trainer(
        accelerator="cpu",
        callbacks=family(Callback),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.strategy.connect(LightningModule())

    def run(times: int) -> None:
        for _ in range(times):
            call._call_callback_hooks(trainer, HOOK, *ARGUMENTS)

    return run


def fabric() -> Contender:
    from lightning.fabric import Fabric
    from lightning.pytorch import Callback

    fabric = Fabric(accelerator="cpu", devices=1, callbacks=family(Callback))

    def run(times: int) -> None:
        for _ in range(times):
            fabric.call(HOOK, None, None, *ARGUMENTS)

    return run


def available() -> Iterator[tuple[str, Contender]]:
    for make in (bare, ours, ours_nobody, trainer, fabric):
        try:
            yield make.__name__, make()
        except ImportError as error:
            print(f"{make.__name__:12} left out: {error}")


def measure(contenders: dict[str, Contender], rounds: int, times: int) -> dict[str, list[float]]:
    """Microseconds a call, for each contender and round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(times)
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            gc.collect()
            started = time.perf_counter()
            contenders[name](times)
            seconds[name].append((time.perf_counter() - started) / times)
    return {name: [value * 1e6 for value in values] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--calls", type=int, default=200, help="calls of the hook in a round")
    results.add_option(parser)
    options = parser.parse_args()
    calls = measure(dict(available()), options.rounds, options.calls)
    print(f"{CALLBACKS} callbacks, one has the hook; {options.rounds} rounds, microseconds a call")
    # What else the machine does slows the fastest round least.
    found = {name: min(values) for name, values in calls.items()}
    for name, cost in found.items():
        ratio = (
            f"   {cost / found['ours']:8.1f} times ours" if name in ("trainer", "fabric") else ""
        )
        print(f"{name:12} {cost:9.3f}{ratio}")
    if options.write:
        results.write("hooks", {"microseconds to call one hook of ten callbacks": calls})


if __name__ == "__main__":
    main()
