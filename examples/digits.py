"""Train a small convolutional network on 1,797 real images of handwritten digits.

One loop, with callbacks, trackers and checkpoints around it. Kill it at any moment and start it
again: it resumes by itself, and ends with the same weights.

    python examples/digits.py
    accel launch --num_processes 2 examples/digits.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, main_process_only, set_seed
from accel_callbacks.callbacks import Checkpoint, EarlyStopping, ProgressBar


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=32, help="of each process")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int)
    parser.add_argument("--cpu", action="store_true", default=None)
    parser.add_argument("--project_dir", default="runs/digits")
    parser.add_argument("--checkpoints", help="folder or URL; in the project_dir by default")
    parser.add_argument("--every_n_steps", type=int, default=20)
    parser.add_argument("--log_with", nargs="*", default=["tensorboard", "jsonl"])
    parser.add_argument("--no_resume", action="store_true", help="start afresh")
    return parser.parse_args()


def load_data(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Every fifth image is kept for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    is_test = torch.arange(len(data)) % 5 == 0
    train = torch.utils.data.Subset(data, torch.nonzero(~is_test).flatten().tolist())
    test = torch.utils.data.Subset(data, torch.nonzero(is_test).flatten().tolist())
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size=64)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


@main_process_only
def report(args: argparse.Namespace, accuracy: float, checkpoints: str) -> None:
    print(f"\ntest accuracy {accuracy:.2%}")
    if "jsonl" in args.log_with:
        print(f"metrics      {args.project_dir}/metrics.jsonl   (one JSON object a line)")
    if "tensorboard" in args.log_with:
        print(f"TensorBoard  tensorboard --logdir {args.project_dir}/tensorboard")
    print(f"checkpoints  {checkpoints}   (each folder's manifest.json says what is in it)")
    print(f"model        {args.project_dir}/model/model.safetensors")


def main() -> None:
    args = parse_arguments()
    set_seed(args.seed)
    checkpoint = Checkpoint(
        args.checkpoints, every_n_steps=args.every_n_steps, keep_last=3, monitor="val/loss"
    )
    accel = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        cpu=args.cpu,
        log_with=args.log_with,
        project_dir=args.project_dir,
        callbacks=[ProgressBar(), EarlyStopping("val/loss", patience=4), checkpoint],
    )
    train, test = load_data(args.batch_size)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train) // accel.num_processes // accel.gradient_accumulation_steps
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(steps, 1))
    loss_fn = nn.CrossEntropyLoss()
    model, optimizer, train, test, scheduler = accel.prepare(
        model, optimizer, train, test, scheduler
    )

    may_change = ["cpu", "project_dir", "checkpoints", "every_n_steps", "log_with"]
    start = {"resume": not args.no_resume, "may_change": may_change}
    with accel.run("digits", config=vars(args), **start) as run:
        for _epoch in run.epochs(args.epochs):
            for images, targets in train:
                with accel.accumulate(model):
                    with accel.autocast():
                        loss = loss_fn(model(images), targets)
                    accel.backward(loss)
                    accel.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                accel.log({"train/loss": loss, "lr": scheduler.get_last_lr()[0]})

            losses, hits = [], []
            with accel.evaluate(model):
                for images, targets in test:
                    logits, labels = accel.gather_for_metrics((model(images), targets))
                    losses.append(nn.functional.cross_entropy(logits, labels, reduction="none"))
                    hits.append(logits.argmax(dim=1) == labels)
            accuracy = torch.cat(hits).float().mean().item()
            accel.log({"val/loss": torch.cat(losses).mean(), "val/accuracy": accuracy})
    accel.save_model(model, f"{args.project_dir}/model")
    report(
        args,
        run.callback_metrics["val/accuracy"],
        args.checkpoints or f"{args.project_dir}/checkpoints",
    )
    accel.end_training()


if __name__ == "__main__":
    main()
