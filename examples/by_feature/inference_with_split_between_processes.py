"""Inference on several processes, without an Accelerator: each takes a share of the inputs.

`PartialState` is who this process is among the others. The shares differ by one at most, nothing
is read twice, and the results come back in the order of the inputs.

    python examples/by_feature/inference_with_split_between_processes.py
    accel launch --num_processes 2 examples/by_feature/inference_with_split_between_processes.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

from accel_callbacks import PartialState, gather_object


def load_classifier(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Weights of a linear classifier, by least squares; they stand for a model that is loaded."""
    wanted = torch.nn.functional.one_hot(targets, 10).to(images.dtype)
    regularised = images.T @ images + torch.eye(images.shape[1], dtype=images.dtype)
    return torch.linalg.solve(regularised, images.T @ wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify images on several processes.")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    state = PartialState(cpu=args.cpu)
    images, targets = (torch.tensor(one) for one in load_digits(return_X_y=True))
    images = torch.cat([images / 16, torch.ones(len(images), 1)], dim=1).float()
    weights = load_classifier(images[:1200], targets[:1200]).to(state.device)
    names = [f"image-{index}" for index in range(1200, len(images))]
    inputs = {"name": names, "image": images[1200:]}

    results = []
    with state.split_between_processes(inputs) as share:  # the feature: this process's inputs
        for start in range(0, len(share["name"]), args.batch_size):
            batch = share["image"][start : start + args.batch_size].to(state.device)
            names_of_batch = share["name"][start : start + args.batch_size]
            guesses = (batch @ weights).argmax(dim=1).tolist()
            results += zip(names_of_batch, guesses, strict=True)

    everything = gather_object(results)  # lists are joined in the order of the processes
    shares = gather_object([len(results)])
    answers = torch.tensor([guess for _, guess in everything])
    accuracy = (answers == targets[1200:]).double().mean().item()
    state.print(f"images of each process: {shares}")
    state.print(f"{len(everything)} results for {len(names)} images")
    state.print(f"in the order of the inputs: {[name for name, _ in everything] == names}")
    state.print(f"accuracy {accuracy:.1%}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
