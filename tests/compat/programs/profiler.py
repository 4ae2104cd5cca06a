"""A profile by options, with a schedule and a function that gets it."""

from __future__ import annotations

import os
import sys

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, set_seed
from outcome import digest, report
from problem import classifier, loaders
from torch.nn.functional import cross_entropy
from torch.optim import SGD

ready: list[int] = []
options = ProfileKwargs(
    activities=["cpu"],
    record_shapes=True,
    schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 0},
    on_trace_ready=lambda profile: ready.append(profile.step_num),
    output_trace_dir=os.path.join(sys.argv[1], "traces"),
)
accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
set_seed(5)
model = classifier()
optimizer = SGD(model.parameters(), lr=0.1)
model, optimizer, train = accelerator.prepare(model, optimizer, loaders()[0])
with accelerator.profile() as profile:
    for points, classes in train:
        loss = cross_entropy(model(points), classes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        profile.step()
with accelerator.profile(ProfileKwargs(activities=["cpu"])) as whole:
    model(points)
named = any(event.key == "aten::addmm" for event in whole.key_averages())
report(weights=digest(accelerator.unwrap_model(model)), ready=ready, named=named)
