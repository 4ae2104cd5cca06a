"""Mixed precision: matrix products in few bits, what is delicate in fp32.

The model runs under autocast and its outputs come back in fp32. The computation outside of it
says for itself where it is: `accel.autocast()`, and `AutocastKwargs(enabled=False)` for a part
that needs all its bits. Weights and optimizer stay in fp32. fp8 needs a device that has it.

    python examples/by_feature/mixed_precision.py --mixed_precision bf16
    accel launch --num_processes 2 --mixed_precision fp16 examples/by_feature/mixed_precision.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import Accelerator, AutocastKwargs, set_seed


def load_data() -> list[TensorDataset]:
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    return random_split(data, [1440, 357], torch.Generator().manual_seed(0))


def create_accelerator(precision: str | None, cpu: bool | None) -> Accelerator:
    options = AutocastKwargs(cache_enabled=True)  # of the autocast around each prepared model
    try:
        return Accelerator(mixed_precision=precision, cpu=cpu, kwargs_handlers=[options])
    except (ImportError, ValueError) as error:
        raise SystemExit(f"{precision} cannot be used here: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description="Train in a lower precision.")
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16", "fp8"])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    accel = create_accelerator(args.mixed_precision, args.cpu)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 32)
    )
    seen: dict[str, torch.dtype] = {"weights": model[2].weight.dtype}
    model[2].register_forward_hook(lambda layer, inputs, output: seen.update(layers=output.dtype))
    codes = torch.randn(10, 32).to(accel.device) / 32**0.5  # what the outputs of a digit are to be
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = load_data()
    model, optimizer, train, test = accel.prepare(
        model, optimizer, DataLoader(train, 32, shuffle=True), DataLoader(test, 64)
    )
    skipped = 0
    for _ in range(args.epochs):
        for images, targets in train:
            features = model(images)
            with accel.autocast():  # the feature: a product outside of the model
                scores = features @ codes.T
                with accel.autocast(AutocastKwargs(enabled=False)):  # and a part in full precision
                    loss = nn.functional.cross_entropy(scores.float(), targets)
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            skipped += accel.optimizer_step_was_skipped
    seen.update(outputs=features.dtype, scores=scores.dtype, loss=loss.dtype)

    hits = []
    with accel.evaluate(model):
        for images, targets in test:
            guesses = (model(images) @ codes.T).argmax(dim=1)
            hits.append(accel.gather_for_metrics(guesses == targets))
    dtypes = ", ".join(f"{name} {str(dtype)[6:]}" for name, dtype in sorted(seen.items()))
    accel.print(f"{accel.mixed_precision}: {dtypes}")
    accel.print(f"{skipped} steps skipped; accuracy {torch.cat(hits).float().mean():.1%}")
    accel.end_training()


if __name__ == "__main__":
    main()
