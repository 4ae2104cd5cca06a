"""The usual loop: prepare, train, evaluate with gather_for_metrics."""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.logging import get_logger
from accelerate.utils import (
    set_seed,  # one seed for all
    tqdm,
)
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


def loaders(size: int) -> tuple[DataLoader, DataLoader]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 4, generator=generator)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return DataLoader(data, batch_size=size), DataLoader(data, batch_size=12)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    accelerator = Accelerator(
        device_placement=True,
        cpu=True,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=None),
    )
    set_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, total_iters=24 * accelerator.num_processes
    )
    train, val = loaders(8)
    model, optimizer, train, val, scheduler = accelerator.prepare(
        model, optimizer, train, val, scheduler
    )
    for _ in range(args.epochs):
        model.train()
        for inputs, targets in tqdm(train, disable=True):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = total = 0
        for inputs, targets in val:
            with torch.no_grad():
                guesses = model(inputs).argmax(1)
            guesses, targets = accelerator.gather_for_metrics((guesses, targets))
            right += int((guesses == targets).sum())
            total += len(targets)
        logger.info("an epoch", main_process_only=True)
        accelerator.print(f"accuracy {right}/{total} lr {scheduler.get_last_lr()[0]:.4f}")
    norm = sum(float(p.norm()) for p in accelerator.unwrap_model(model).parameters())
    accelerator.print(f"norm {norm:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
