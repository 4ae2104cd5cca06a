"""A training on one of several replicas; it writes what each committed window was made of.

python job.py ROOT NAME OPTIONS_AS_JSON
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from accel_callbacks import Accelerator, TorchFTKwargs
from accel_callbacks.callbacks import Callback, Checkpoint

SAMPLES, BATCH = 96, 4


class Numbers(Dataset):
    """Samples that know their index."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(8, generator=generator), torch.randn(1, generator=generator)


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model, batch):
    return torch.nn.functional.mse_loss(model(batch[1]), batch[2])


class Ledger:
    """Appends a line for each event, which is there once `write` returns."""

    def __init__(self, root, name):
        self.path = Path(root) / f"{name}.{os.getpid()}.jsonl"

    def write(self, **row):
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()


def strike(options, phase, step):
    """Hit this process at the phase and step that the options name."""
    if options.get("phase") != phase or options.get("at") != step:
        return
    mark = Path(options["mark"])
    if mark.exists():
        return
    mark.touch()
    os.kill(os.getpid(), signal.SIGSTOP if options.get("stop") else signal.SIGKILL)


def hold(root, options, step):
    """Wait at a step until as many processes have begun as the options say."""
    if options.get("hold_at") == step:
        while len(list(Path(root).glob("*.up"))) < options["hold_for"]:
            time.sleep(0.02)


class Struck(Callback):
    """Strikes where a hook is the place."""

    def __init__(self, options, began):
        self.options = options
        self.began = began

    def setup(self, run, model, stage):
        self.began.touch()

    def on_before_backward(self, run, model, loss):
        strike(self.options, "before_sum", run.global_step)

    def on_before_optimizer_step(self, run, model, optimizer):
        strike(self.options, "after_vote", run.global_step)

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        strike(self.options, "before_quorum", run.global_step)


def main():
    root, name, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    ledger = Ledger(root, name)
    callbacks = [Struck(options, Path(root) / f"{name}.{os.getpid()}.up")]
    if options.get("checkpoints"):
        callbacks.append(Checkpoint(every_n_steps=5))
    accel = Accelerator(
        cpu=True,
        project_dir=os.path.join(root, "project"),
        log_with="jsonl" if options.get("log") else None,
        gradient_accumulation_steps=options.get("accumulate", 1),
        callbacks=callbacks,
        kwargs_handlers=[
            TorchFTKwargs(
                lighthouse=options["lighthouse"],
                replicas=options["replicas"],
                min_replicas=options.get("min_replicas", 1),
                replica=name,
                timeout=options.get("timeout", 20),
                wait=options.get("wait", 120),
            )
        ],
    )
    model = network(seed=os.getpid())  # each replica begins with other weights
    loader = DataLoader(Numbers(), BATCH, shuffle=True, num_workers=options.get("workers", 0))
    model, optimizer, loader = accel.prepare(model, optimizer_of(model), loader)
    scheduler = accel.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9))
    with accel.run("replicas") as run:
        rounds = accel.loop.rounds
        if run.global_step == 0:
            torch.save(accel.get_state_dict(model), Path(root) / f"{name}.{os.getpid()}.first")
        ledger.write(joined=run.global_step, epoch=run.current_epoch, writes=rounds.writes)
        window = []
        for epoch in run.epochs(options["epochs"]):
            for batch in loader:
                hold(root, options, run.global_step)
                with accel.accumulate(model):
                    if run.global_step >= options.get("pause_from", 0):
                        time.sleep(options.get("pause", 0.0))
                    window.append(batch[0].tolist())
                    if accel.sync_gradients:
                        attempt = {
                            "step": run.global_step,
                            "epoch": epoch,
                            "attempt": repr((rounds._connected, rounds.state_dict())),
                            "place": rounds._share.place,
                            "replicas": rounds._share.replicas,
                        }
                        ledger.write(drawn=window, **attempt)
                    accel.backward(loss_of(model, batch))
                    before = run.global_step
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    if accel.sync_gradients:
                        ledger.write(committed=run.global_step > before, **attempt)
                        window = []
                        if options.get("log"):
                            accel.log({"loss": float(before)})
    accel.save_model(model, os.path.join(root, f"model-{name}"))  # the one that writes alone does
    torch.save(accel.get_state_dict(model), Path(root) / f"{name}.last")
    ledger.write(ended=True, learning_rate=scheduler.get_last_lr()[0])
    print("ended", name, flush=True)


if __name__ == "__main__":
    main()
