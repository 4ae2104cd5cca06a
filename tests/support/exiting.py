"""A training program that ends in one of many ways, at once and with much still open.

Arguments: where the training runs, how it ends, the rank that ends it (or ``both``), what is open
meanwhile (words with commas), and a folder.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, debug_launcher, notebook_launcher

kept: list[Any] = []  # alive until the interpreter ends, as the variables of a script are
trains = threading.Event()


def end_here(rank: int) -> None:
    if who not in ("both", str(rank)):
        return
    if ending == "raise":
        raise ValueError("the end")
    if ending.startswith("exit"):
        sys.exit(int(ending.partition(" ")[2]))


def train() -> None:
    accel = Accelerator(
        cpu=True,
        timeout=timedelta(minutes=10),
        project_dir=folder,
        log_with="jsonl" if "tracker" in opened else None,
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 1))
    if "cycle" in opened:
        model.itself = [model]
    optimizer = torch.optim.AdamW(model.parameters())
    workers = 1 if "workers" in opened else 0
    data = TensorDataset(torch.ones(64, 4))
    loader = DataLoader(data, 4, num_workers=workers, persistent_workers=workers > 0)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    kept.append((accel, model, optimizer, loader))
    if "tracker" in opened:
        accel.init_trackers("exits")
    if place == "run":
        with accel.run("exits", resume=False):
            loop(accel, model, optimizer, loader)
    else:
        loop(accel, model, optimizer, loader)


def loop(accel: Any, model: Any, optimizer: Any, loader: Any) -> None:
    while True:
        for index, (batch,) in enumerate(loader):
            loss = model(batch).sum()
            kept[1:] = [loss]
            accel.backward(loss)
            if index == 2:
                if "save" in opened:
                    accel.save_state(os.path.join(folder, "state"), async_save=True)
                trains.set()
                end_here(accel.process_index)
            optimizer.step()
            optimizer.zero_grad()
            if "tracker" in opened:
                accel.log({"loss": loss.detach()})
        if ending == "destroy":
            torch.distributed.destroy_process_group()
        if ending != "stay":
            return


def in_thread(daemon: bool) -> None:
    thread = threading.Thread(target=train, daemon=daemon)
    thread.start()
    if daemon and ending == "stay":
        trains.wait()
    else:
        thread.join()


if __name__ == "__main__":
    place, ending, who, extras, folder = sys.argv[1:]
    opened = extras.split(",")
    if "uncollected" in opened:
        gc.disable()
    if place == "thread":
        in_thread(daemon=False)
    elif place == "daemon":
        in_thread(daemon=True)
    elif place == "notebook":
        notebook_launcher(train, num_processes=2)
    elif place == "debug":
        debug_launcher(train, num_processes=2)
    else:
        train()
