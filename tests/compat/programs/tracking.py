"""A tracker of one's own beside TensorBoard, on the main process."""

from __future__ import annotations

import os
import sys

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from outcome import digest, report
from problem import classifier, loaders
from torch.nn.functional import cross_entropy
from torch.optim import SGD

folder = sys.argv[1]
calls: list[object] = []


class Notes(GeneralTracker):
    name = "notes"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.run_name = run_name

    @property
    def tracker(self):
        return self.run_name

    @on_main_process
    def store_init_configuration(self, values):
        calls.append(values)

    @on_main_process
    def log(self, values, step=None, **kwargs):
        calls.append([step, {key: float(value) for key, value in values.items()}, kwargs])


accelerator = Accelerator(cpu=True, log_with=["tensorboard", Notes("a run")], project_dir=folder)
set_seed(5)
model = classifier()
optimizer = SGD(model.parameters(), lr=0.1)
model, optimizer, train = accelerator.prepare(model, optimizer, loaders()[0])
accelerator.init_trackers("project", config={"lr": 0.1, "epochs": 2})
for epoch in range(2):
    total = 0.0
    for points, classes in train:
        loss = cross_entropy(model(points), classes)
        total += loss.detach().float().item()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.log({"loss": total, "epoch": epoch}, step=epoch)
accelerator.log({"last": 1.0}, step=2, log_kwargs={"notes": {"commit": True}})
notes = accelerator.get_tracker("notes")
value = notes.tracker if accelerator.is_main_process else None
board = accelerator.get_tracker("tensorboard")
writes = hasattr(board.tracker, "add_scalar") if accelerator.is_main_process else None
accelerator.end_training()
events = any("tfevents" in name for _, _, names in os.walk(folder) for name in names)
report(
    weights=digest(accelerator.unwrap_model(model)),
    calls=calls,
    value=value,
    writes=writes,
    events=events,
)
