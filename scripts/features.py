"""Features as numbers that one process computes too: see ``scripts/parity``."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from accel_callbacks import (
    Accelerator,
    DeepSpeedPlugin,
    ParallelismConfig,
    TorchTensorParallelConfig,
)
from accel_callbacks.callbacks import EMA, Checkpoint, NonFinite
from accel_callbacks.utils import send_to_device
from tests.support.known_models import BUILDERS, batches

MODEL = "llama"
ROWS, LENGTH = 8, 8
#: Engines under which the loop gives a model its positions and shifted labels, and a loss its
#: normalizer.
CUT_SEQUENCES = ("sp", "cp")
BATCHES_OF_A_RUN = 16
Numbers = list[float]


def model_batches(model_name: str, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches as models of transformers want them, whose sequences may be cut."""
    for batch in batches(model_name, count, LENGTH):
        if model_name in ("gpt2", "llama"):
            tokens = batch["input_ids"]
            batch["position_ids"] = torch.arange(LENGTH).repeat(ROWS, 1)
            batch["shift_labels"] = F.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
        yield batch


@dataclass(frozen=True)
class Lab:
    """The arrangement under which a feature runs, and a folder that all ranks see.

    Args:
        sizes: those of a ``ParallelismConfig``; none for one process.
        folder: for checkpoints.
        zero_stage: of DeepSpeed, None without it.
        on_xla: compute on the devices of XLA.
    """

    sizes: Mapping[str, int]
    folder: Path
    zero_stage: int | None = None
    on_xla: bool = False

    def accelerator(self, **options: Any) -> Accelerator:
        """Return an Accelerator of the arrangement."""
        if self.sizes:
            handler = (
                TorchTensorParallelConfig(plan="proposed") if "tp_size" in self.sizes else None
            )
            options["parallelism_config"] = ParallelismConfig(**self.sizes, tp_handler=handler)
        if self.zero_stage is not None:
            options["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=self.zero_stage)
        return Accelerator(cpu=not self.on_xla, timeout=timedelta(seconds=60), **options)


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
            for batch in model_batches(model_name, count)
            for row in range(ROWS)
        ]
        loader = torch.utils.data.DataLoader(data, ROWS // accel.data_world)
        return cls(accel, *accel.prepare(model, optimizer, loader))

    def sequences(self, batch: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return the context in which a rank has its part of each sequence, if it shares them."""
        tensors = list(batch.values())
        return self.accel.maybe_context_parallel(
            buffers=tensors, buffer_seq_dims=[1] * len(tensors), no_restore_buffers=set(tensors)
        )

    @property
    def shares_sequences(self) -> bool:
        """Whether a rank has a part of each sequence."""
        config = self.accel.parallelism_config
        return config is not None and config.cp_size * config.sp_size > 1

    def loss(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss and what it is to be divided by, where ranks have unequal counts."""
        if not self.shares_sequences:
            return self.model(**batch).loss, None
        count = (batch["shift_labels"] != -100).sum()
        return self.model(**batch, num_items_in_batch=1).loss, count

    def mean(self, loss: torch.Tensor, count: torch.Tensor | None = None) -> float:
        """Collective: return the mean of the losses of all ranks."""
        if count is not None:
            total, counts = self.accel.reduce(torch.stack([loss.detach().float(), count]), "sum")
            return float(total / counts)
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
        last = accel.strategy.data.rank == accel.data_world - 1
        for index, batch in enumerate(self.loader):
            with accel.accumulate(self.model), self.sequences(batch):
                loss, count = self.loss(batch)
                spoilt_loss = loss * math.nan if last and index == spoilt else loss
                accel.backward(spoilt_loss, **({} if count is None else {"normalizer": count}))
                if max_norm is not None and accel.sync_gradients:
                    numbers.append(float(accel.clip_grad_norm_(self.model.parameters(), max_norm)))
                self.optimizer.step()
                self.optimizer.zero_grad()
            if index != spoilt:
                numbers.append(self.mean(loss, count))
            if save_to is not None and index + 1 == after:
                accel.save_state(str(save_to))
                numbers.clear()
        return numbers

    def evaluate(self) -> float:
        """Collective: return the loss of a batch, by the weights that evaluation sees."""
        batch = send_to_device(next(model_batches(MODEL, count=1)), self.accel.device)
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
    prompts = next(model_batches(MODEL, count=1))["input_ids"][:2, :4].to(parts.accel.device)
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
    """Go on from what each engine has saved, in a window if its losses had a normalizer too."""
    outcomes = {}
    for folder in sorted(lab.folder.parent.iterdir()):
        alike = (folder.name in CUT_SEQUENCES) == (lab.folder.name in CUT_SEQUENCES)
        if (folder / name).exists() and (alike or name == "saved"):
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
    "bf16": (bf16, 5e-2),
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
