"""Train with DeepSpeed: ZeRO shards the optimizer's states, gradients and weights.

One argument of the Accelerator, or a flag of the launcher; the loop is the one of a single
process. --stage 2 shards states and gradients, --stage 3 weights too. The result is how many
weights are whole on a process after a step, and the accuracy, which the saved model has in plain
torch.

    accel launch --num_processes 2 examples/by_feature/deepspeed_zero.py --stage 2
    accel launch --num_processes 2 examples/by_feature/deepspeed_zero.py --stage 3
"""

from __future__ import annotations

import argparse
import importlib.util

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import Accelerator, DeepSpeedPlugin, set_seed
from checkpoint_io import load_model


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with DeepSpeed.")
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        raise SystemExit("this example needs DeepSpeed: pip install 'accel-callbacks[deepspeed]'")

    set_seed(0)
    # The feature. DeepSpeed keeps small weights whole in stage 3, and all of these are small.
    zero = {"stage": args.stage, "stage3_param_persistence_threshold": 0}
    accel = Accelerator(cpu=args.cpu, deepspeed_plugin=DeepSpeedPlugin({"zero_optimization": zero}))
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    train, test = random_split(data, [1440, 357], torch.Generator().manual_seed(0))
    with accel.init_module():  # in stage 3 no process ever holds the whole model
        model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train, loader = accel.prepare(
        model,
        optimizer,
        DataLoader(train, args.batch_size // accel.data_world, shuffle=True),
        DataLoader(test, 64),
    )
    for _ in range(args.epochs):
        for images, targets in train:
            loss = nn.functional.cross_entropy(model(images), targets)
            accel.backward(loss)
            accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    whole = sum(parameter.numel() for parameter in model.parameters())
    accel.print(f"ZeRO stage {args.stage}: {whole} weights are whole after a step")

    hits = []
    with accel.evaluate(model):
        for images, targets in loader:
            hits.append(accel.gather_for_metrics(model(images).argmax(dim=1) == targets))
    right = int(torch.cat(hits).sum())
    accel.save_model(model, "runs/zero")
    accel.print(f"accuracy {right / len(test):.1%}")
    if accel.is_main_process:
        plain = build_model()
        load_model(plain, "runs/zero")
        images, targets = (torch.stack(column) for column in zip(*test, strict=True))
        same = int((plain(images).argmax(dim=1) == targets).sum()) == right
        print(f"the saved model has the same in plain torch: {same}")
    accel.end_training()


if __name__ == "__main__":
    main()
