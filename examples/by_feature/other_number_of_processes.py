"""A checkpoint of sharded tensors, saved by some processes and loaded by another number of them.

Each process writes its own shards and reads only the bytes it needs. A single process, without
torch.distributed, reads the same checkpoint whole.

    accel launch --num_processes 2 examples/by_feature/other_number_of_processes.py
    python examples/by_feature/other_number_of_processes.py --load runs/sharded
"""

from __future__ import annotations

import argparse

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import checkpoint_io
from accel_callbacks import PartialState

SHAPES = {"embedding": (1000, 64), "out": (10, 64)}


def whole(name: str) -> torch.Tensor:
    """The weights that all runs of this example agree on."""
    rows, columns = SHAPES[name]
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


def save(state: PartialState, url: str) -> None:
    weights, group = {name: whole(name) for name in SHAPES}, None
    if state.num_processes > 1:
        mesh = init_device_mesh(state.device.type, (state.num_processes,))
        weights = {name: distribute_tensor(weights[name], mesh, [Shard(0)]) for name in SHAPES}
        group = checkpoint_io.TorchGroup()
    # The feature: tensors that are spread over processes are saved as they lie there.
    manifest = checkpoint_io.save(url, {"weights": weights}, group=group)
    chunks = len(manifest.tensors["weights/embedding"].chunks)
    state.print(f"saved in {chunks} chunks by {manifest.world_size} processes")


def load(state: PartialState, url: str) -> None:
    if state.num_processes == 1:
        weights = checkpoint_io.load(url).state["weights"]
        right = all(torch.equal(weights[name], whole(name)) for name in SHAPES)
    else:
        mesh = init_device_mesh(state.device.type, (state.num_processes,))
        # The feature: each process gives the tensors it holds, and only their bytes are read.
        targets = {
            name: distribute_tensor(torch.zeros(shape), mesh, [Shard(1)])
            for name, shape in SHAPES.items()
        }
        checkpoint_io.load(url, into={"weights": targets})
        right = all(_is_whole(name, tensor) for name, tensor in targets.items())
    state.print(f"loaded by {state.num_processes} processes, all as saved: {right}")


def _is_whole(name: str, tensor: DTensor) -> bool:
    return torch.equal(tensor.full_tensor().cpu(), whole(name))


def main() -> None:
    parser = argparse.ArgumentParser(description="Save on some processes, load on others.")
    parser.add_argument("--save", default="runs/sharded", help="a path or any fsspec URL")
    parser.add_argument("--load", default=None, help="load what is there, and save nothing")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()
    state = PartialState(cpu=args.cpu)
    if args.load is None:
        save(state, args.save)
    load(state, args.load or args.save)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
