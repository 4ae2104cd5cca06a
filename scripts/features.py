"""Features as numbers that one process computes too: see ``scripts/parity``."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel_callbacks import (
    Accelerator,
    DeepSpeedPlugin,
    ParallelismConfig,
    TorchTensorParallelConfig,
)
from accel_callbacks.callbacks import EMA, Checkpoint, NonFinite
from tests.support.known_models import BUILDERS, batches

MODEL = "llama"
ROWS = 8
BATCHES_OF_A_RUN = 16
Numbers = list[float]


@dataclass(frozen=True)
class Lab:
    """The arrangement under which a feature runs, and a folder that all ranks see.

    Args:
        sizes: those of a ``ParallelismConfig``; none for one process.
        folder: for checkpoints.
        zero_stage: of DeepSpeed, None without it.
    """

    sizes: Mapping[str, int]
    folder: Path
    zero_stage: int | None = None

    def accelerator(self, **options: Any) -> Accelerator:
        """Return an Accelerator of the arrangement."""
        if self.sizes:
            handler = (
                TorchTensorParallelConfig(plan="proposed") if "tp_size" in self.sizes else None
            )
            options["parallelism_config"] = ParallelismConfig(**self.sizes, tp_handler=handler)
        if self.zero_stage is not None:
            options["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=self.zero_stage)
        return Accelerator(cpu=True, timeout=timedelta(seconds=60), **options)


class Parts(NamedTuple):
    """A prepared model with its optimizer and its loader.

    Attributes:
        accel: by which they are prepared.
        model: of transformers.
        optimizer: AdamW.
        loader: of the batches of this rank.
    """

    accel: Accelerator
    model: Any
    optimizer: Any
    loader: Any

    @classmethod
    def of(cls, accel: Accelerator, count: int, model_name: str = MODEL) -> Parts:
        """Return a new model, the same each time, and ``count`` batches of all ranks together."""
        torch.manual_seed(0)
        model = BUILDERS[model_name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        data = [
            {name: tensor[row] for name, tensor in batch.items()}
            for batch in batches(model_name, count)
            for row in range(ROWS)
        ]
        loader = torch.utils.data.DataLoader(data, ROWS // accel.data_world)
        return cls(accel, *accel.prepare(model, optimizer, loader))

    def mean(self, loss: torch.Tensor) -> float:
        """Collective: return the mean of the losses of all ranks."""
        return float(self.accel.reduce(loss.detach().float(), "mean"))

    def train(
        self,
        max_norm: float | None = None,
        spoilt: int | None = None,
        save_to: Path | None = None,
        after: int = 0,
    ) -> Numbers:
        """Collective: train for an epoch; return the losses, and norms before they are clipped.

        Args:
            max_norm: to clip by.
            spoilt: the batch whose loss is NaN on the last data rank.
            save_to: save there, and return what comes after it.
            after: the batches before the save.
        """
        accel, numbers = self.accel, []
        last = accel.strategy.data_rank == accel.data_world - 1
        for index, batch in enumerate(self.loader):
            with accel.accumulate(self.model):
                loss = self.model(**batch).loss
                accel.backward(loss * math.nan if last and index == spoilt else loss)
                if max_norm is not None and accel.sync_gradients:
                    numbers.append(float(accel.clip_grad_norm_(self.model.parameters(), max_norm)))
                self.optimizer.step()
                self.optimizer.zero_grad()
            if index != spoilt:
                numbers.append(self.mean(loss))
            if save_to is not None and index + 1 == after:
                accel.save_state(str(save_to))
                numbers.clear()
        return numbers

    def evaluate(self) -> float:
        """Collective: return the loss of a batch, by the weights that evaluation sees."""
        batch = next(batches(MODEL, count=1))
        with self.accel.evaluate(self.model):
            return self.mean(self.model(**batch).loss)


def losses(lab: Lab) -> Numbers:
    parts = Parts.of(lab.accelerator(), 4)
    return [*parts.train(), parts.evaluate()]


def windows(lab: Lab) -> Numbers:
    """Windows of three over seven batches: the last one has a single batch."""
    return Parts.of(lab.accelerator(gradient_accumulation_steps=3), 7).train(max_norm=0.5)


def bf16(lab: Lab) -> Numbers:
    return Parts.of(lab.accelerator(mixed_precision="bf16"), 6).train(max_norm=0.5)


def fp16(lab: Lab) -> Numbers:
    return Parts.of(lab.accelerator(mixed_precision="fp16"), 6).train(max_norm=0.5)


def ema(lab: Lab) -> Numbers:
    """Loss by averaged weights."""
    parts = Parts.of(lab.accelerator(callbacks=[EMA(decay=0.5)]), 4)
    with parts.accel.run("ema"):
        return [*parts.train(), parts.evaluate()]


def non_finite(lab: Lab) -> Numbers:
    """A batch that is NaN on one rank is left out on all."""
    parts = Parts.of(lab.accelerator(callbacks=[NonFinite(action="skip")]), 4)
    with parts.accel.run("non finite"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [*parts.train(spoilt=1), parts.evaluate()]


def generate(lab: Lab) -> Numbers:
    parts = Parts.of(lab.accelerator(), 2)
    parts.train()
    prompts = next(batches(MODEL, count=1))["input_ids"][:2, :4]
    with parts.accel.evaluate(parts.model):
        tokens = parts.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False,
            pad_token_id=0, eos_token_id=None, use_cache=False,
        )  # fmt: skip
    return [float(token) for token in tokens.flatten()]


def compiled(lab: Lab) -> Numbers:
    return Parts.of(lab.accelerator(dynamo_backend="aot_eager"), 3).train(max_norm=0.5)


def save(lab: Lab, name: str = "saved", after: int = 4) -> Numbers:
    """Save after some of six batches, two of which are a window, and go on."""
    parts = Parts.of(lab.accelerator(gradient_accumulation_steps=2), 6)
    return [*parts.train(save_to=lab.folder / name, after=after), parts.evaluate()]


def resume(lab: Lab, name: str = "saved") -> dict[str, Numbers]:
    """Go on from what each engine has saved."""
    outcomes = {}
    for folder in sorted(lab.folder.parent.iterdir()):
        if (folder / name).exists():
            parts = Parts.of(lab.accelerator(gradient_accumulation_steps=2), 6)
            parts.accel.load_state(str(folder / name))
            outcomes[folder.name] = [*parts.train(), parts.evaluate()]
    return outcomes


def survives(lab: Lab) -> Numbers:
    """Train with a checkpoint after each step, go on where it was killed; digest the weights."""
    callback = Checkpoint(dirpath=str(lab.folder / "steps"), every_n_steps=1)
    parts = Parts.of(lab.accelerator(callbacks=[callback]), BATCHES_OF_A_RUN)
    progress = lab.folder / "progress"

    def tell(*args: Any) -> None:
        with progress.open("a") as file:
            file.write(".")

    parts.model.register_forward_hook(tell)
    with parts.accel.run("survives", resume=True) as run:
        for _ in run.epochs(1):
            parts.train(max_norm=0.5)
    state = parts.accel.get_state_dict(parts.model, all_ranks=True)
    weights = b"".join(state[name].float().numpy().tobytes() for name in sorted(state))
    return [float(int.from_bytes(hashlib.sha256(weights).digest()[:6], "big"))]


#: A feature, and by how much its numbers may differ from those of one process.
FEATURES: dict[str, tuple[Callable[[Lab], Any], float]] = {
    "losses": (losses, 1e-5),
    "windows, clipping": (windows, 1e-5),
    "bf16": (bf16, 3e-2),
    "fp16": (fp16, 3e-2),
    "EMA": (ema, 1e-5),
    "NonFinite": (non_finite, 1e-5),
    "generate": (generate, 0.0),
    "compile": (compiled, 1e-5),
    "save": (save, 1e-5),
    "save in a window": (partial(save, name="window", after=3), 1e-5),
}
#: How each engine goes on from what all have saved in a feature.
RESUMES: dict[str, tuple[Callable[[Lab], dict[str, Numbers]], str]] = {
    "resume from each": (resume, "save"),
    "resume in a window": (partial(resume, name="window"), "save in a window"),
}
