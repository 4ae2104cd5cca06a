"""Kill a Trainer at chosen moments of a save and resume it, each in a fork of one process.

Run by test_trainer_checkpoints.py on this library.  Prints a line of JSON for each moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import checkpoint_io.folder.sealed as sealed
from accel_callbacks import collectives
from accel_callbacks.callbacks import EMA
from accel_callbacks.callbacks.adapters import to_transformers
from accel_callbacks.compat import trainer as amended

WORDS, LENGTH = 32, 8


def train(
    folder: Path,
    resume: bool | str | None = None,
    size: int = 2,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Any,
) -> str:
    """Return the digest of weights and their average; an epoch has six steps."""
    set_seed(0)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (12, LENGTH), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes))
    common: dict[str, Any] = {
        **{"use_cpu": True, "disable_tqdm": True, "report_to": [], "logging_steps": 4},
        **{"per_device_train_batch_size": size, "num_train_epochs": 2, "learning_rate": 1e-2},
        **{"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2},
        **{"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss"},
    }
    arguments = TrainingArguments(output_dir=str(folder), **(common | options))
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:3])
    average = EMA(0.9)
    for callback in (to_transformers(average, trainer=trainer), *callbacks):
        trainer.add_callback(callback)
    newest = get_last_checkpoint(folder) if folder.exists() else None
    trainer.train(resume_from_checkpoint=newest if resume == "newest" else resume)
    best = trainer.state.best_model_checkpoint
    assert size != 2 or Path(best or "").parent == folder, best
    digest = hashlib.sha256()
    averages = collectives.tensors_in(average.state_dict())
    assert len(averages) > 10
    for tensor in (*model.state_dict().values(), *averages):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def in_fork(work: Callable[[], Any]) -> Any:
    """Return what a function returns in a fork, the signal that ends it, or its error."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            outcome: Any = work()
        except (Exception, SystemExit) as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    status = os.waitpid(pid, 0)[1]
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else json.loads(said)


def dies_at(module: Any, name: str, calls: int) -> Callable[[], None]:
    """Return what lets this process kill itself at a call of a function, in place of the call."""

    def arrange() -> None:
        plain, counted = getattr(module, name), iter(range(1, 10**6))

        def call(*args: Any, **options: Any) -> Any:
            if next(counted) == calls:
                if name == "save":  # half of the file is there
                    Path(args[1]).write_bytes(b"PK\x03\x04 half")
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **options)

        setattr(module, name, call)

    return arrange


# A save calls torch.save for training_args.bin, optimizer.pt, scheduler.pt and rng_state.pth, and
# renames the seal and the folder.
MOMENTS = {
    "optimizer.pt of the second": dies_at(torch, "save", 6),
    "rng_state.pth at the end of an epoch": dies_at(torch, "save", 12),
    "the first": dies_at(torch, "save", 2),
    "the seal": dies_at(sealed, "replace", 2),
    "before the name": dies_at(amended, "_publish", 2),
    "after the name": dies_at(amended, "sync_folder", 3),
    "an older one is removed": dies_at(shutil, "rmtree", 6),
}


def resumed(folder: Path, **options: Any) -> str:
    return train(folder, "newest", **options)


def damaged(folder: Path) -> dict[str, Any]:
    """Return what comes of a newest checkpoint with another byte in it."""
    path = folder / "checkpoint-12" / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    named = in_fork(lambda: train(folder, str(path.parent)))
    outcomes = {"named": named, "newest": in_fork(lambda: train(folder, True))}
    in_fork(lambda: train(folder, True, size=4))  # warns
    return outcomes


def replaced(folder: Path) -> str:
    """Die between the two renames of a checkpoint whose name is taken, and resume."""
    plain = amended.replace

    def rename(old: Any, new: Any) -> None:
        plain(old, new)
        if "replaced-checkpoint-4" in str(new):
            os.kill(os.getpid(), signal.SIGKILL)

    (folder / "checkpoint-4").mkdir(parents=True)

    def work() -> str:
        amended.replace = rename
        return train(folder)

    assert in_fork(work) == "SIGKILL"
    newest = in_fork(lambda: get_last_checkpoint(folder))
    assert newest == str(folder / "_accel_saving" / "checkpoint-4"), newest
    return str(in_fork(lambda: resumed(folder)))


class Terminated(TrainerCallback):
    """Sends this process a signal at the end of a step that the Trainer does not save at."""

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == 5:
            signal.raise_signal(signal.SIGTERM)


def terminated(folder: Path, **options: Any) -> dict[str, Any]:
    """Return what comes of a signal, and of a resume after it."""
    stopped = in_fork(lambda: train(folder, callbacks=[Terminated()], **options))
    newest = max(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))
    ended = in_fork(lambda: resumed(folder, **options))
    return {"stopped": stopped, "newest": newest, "resumed": ended}


def mirrored(folder: Path) -> dict[str, Any]:
    """Return what comes of a run whose disk is lost, and whose newest copy is damaged."""
    mirror = folder / "mirror"
    os.environ["ACCEL_MIRROR_CHECKPOINTS"] = f"file://{mirror}"
    stopped = in_fork(lambda: train(folder / "run", callbacks=[Terminated()]))
    shutil.rmtree(folder / "run")
    copies = sorted((mirror / "run").iterdir())
    first = max(copies[-1].glob("tensors-*"), key=lambda file: file.stat().st_size)
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    ended = in_fork(lambda: resumed(folder / "run"))
    kept = sorted(path.name for path in (mirror / "run").iterdir())
    return {"stopped": stopped, "copies": [c.name for c in copies], "ended": ended, "kept": kept}


def main() -> None:
    base = Path(sys.argv[1])
    say = lambda name, outcome: print(json.dumps([name, outcome]), flush=True)  # noqa: E731
    say("unbroken", in_fork(lambda: train(base / "unbroken")))
    for name, arrange in MOMENTS.items():
        folder = base / name.replace(" ", "_")

        def work(arrange: Any = arrange, folder: Path = folder) -> str:
            arrange()
            return train(folder)

        ended = in_fork(work)
        assert ended == "SIGKILL", f"{name}: {ended}"
        say(name, in_fork(lambda folder=folder: resumed(folder)))
        left = sorted(path.name for path in folder.iterdir())
        assert left == ["checkpoint-10", "checkpoint-12"], left
    say("its name is taken", replaced(base / "taken"))
    say("terminated", terminated(base / "terminated"))
    best = {"save_strategy": "best", "eval_steps": 5}
    say("best", terminated(base / "best", **best))
    say("best unbroken", in_fork(lambda: train(base / "best unbroken", **best)))
    say("mirrored", mirrored(base / "mirrored"))
    del os.environ["ACCEL_MIRROR_CHECKPOINTS"]
    say("damaged", damaged(base / "unbroken"))


if __name__ == "__main__":
    main()
