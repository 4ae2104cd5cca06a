"""A training with all that a run may be left from: functions for tests, and a script."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from accel_callbacks import Accelerator, Callback, FullyShardedDataParallelPlugin, set_seed
from accel_callbacks.callbacks import EMA, Checkpoint, EarlyStopping, Preemption, cloud_notice

EPOCHS = 2
Visit = Callable[[str, int], None]


class Hooks(Callback):
    """Visits the places that only callbacks see."""

    runs_last = True
    saves_alike = True

    def __init__(self, visit: Visit) -> None:
        self.visit = visit

    def on_fit_start(self, run, model):
        self.visit("fit start", 0)

    def on_save_checkpoint(self, run, model, checkpoint):
        self.visit("save", run.global_step)

    def on_train_epoch_end(self, run, model):
        self.visit("epoch end", run.current_epoch)

    def on_validation_end(self, run, model):
        self.visit("validation end", run.current_epoch)


def train(
    folder: str | os.PathLike[str] | None,
    visit: Visit = lambda place, number: None,
    *,
    compiles: bool = False,
    sharded: bool = False,
    **options,
) -> tuple[list[int], list[float]]:
    """Train to the end, or until the run is left; returns the steps taken, and the weights.

    Args:
        folder: of checkpoints, None to keep none.
        visit: called at each place with its name and a number.
        compiles: visit a compilation too.
        sharded: under FSDP.
        **options: of the Preemption.
    """
    set_seed(3)
    callbacks = [
        Preemption(**options),
        EMA(decay=0.5),
        EarlyStopping("val", patience=9),
        Hooks(visit),
    ]
    if folder is not None:
        callbacks.append(Checkpoint(folder, every_n_epochs=1, keep_last=None))
    accel = Accelerator(
        cpu=True,
        callbacks=callbacks,
        timeout=timedelta(minutes=10),
        fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None,
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    data = torch.utils.data.DataLoader(torch.randn(16, 4), 2, shuffle=True)
    val = torch.utils.data.DataLoader(torch.randn(24, 4), 2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, data, val = accel.prepare(model, optimizer, data, val)
    accel.register_for_checkpointing(scheduler)
    model.register_forward_hook(lambda *_: visit("forward", accel.current_run.global_step))

    def compiler(graph, inputs):
        for number in range(8):
            visit("compile", number)
        return graph.forward

    def loss_of(output):
        return output.square().mean()

    if compiles:
        loss_of = torch.compile(loss_of, backend=compiler)

    def evaluate(place: str) -> torch.Tensor:
        losses = []
        with accel.evaluate(model):
            for index, batch in enumerate(val):
                visit(place, index)
                noisy = batch + 0.01 * torch.randn(batch.shape)
                losses.append(accel.gather(loss_of(model(noisy))).mean())
        return torch.stack(losses).mean()

    steps: list[int] = []
    with accel.run("left", resume=folder is not None) as run:
        if not run.global_step:
            with torch.random.fork_rng(devices=[]):  # it may be repeated
                evaluate("sanity")
        for epoch in run.epochs(EPOCHS):
            visit("epoch", epoch)
            for batch in data:
                accel.backward(loss_of(model(batch)))
                optimizer.step()
                optimizer.zero_grad()
                steps.append(run.global_step)
                visit("step", run.global_step)
            scheduler.step()  # by the epoch: again in a resumed run that was left behind it
            torch.rand(1)
            visit("between", epoch)
            accel.log({"val": evaluate(f"validation {epoch}")})
        evaluate("test")
    weights = [x.item() for p in accel.get_state_dict(model).values() for x in p.flatten()]
    return steps, weights


def main(folder: str, pace: float) -> None:
    """Write down each place, slowly, so that somebody can send a signal; the weights at the end."""
    rank = os.environ.get("RANK", "0")
    with open(f"{folder}/pid-{rank}", "w") as file:
        file.write(str(os.getpid()))

    def visit(place: str, number: int) -> None:
        with open(f"{folder}/places-{rank}", "a") as file:
            file.write(json.dumps([place, number]) + "\n")
        time.sleep(pace)

    cloud_notice._EVERY = 0.1
    # The address is that of the variable.
    notices = "gce" if "ACCEL_METADATA_ADDRESS" in os.environ else ()
    _, weights = train(f"{folder}/checkpoints", visit, compiles=True, notices=notices)
    with open(f"{folder}/weights-{rank}", "w") as file:
        json.dump(weights, file)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
