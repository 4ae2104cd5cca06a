"""Batches and devices on a GPU: what is copied ahead, and where control tensors are."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import textwrap
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, DataLoaderConfiguration

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def busy(seconds: float = 1.0) -> None:
    """Queue work on the computing stream that outlasts what a test does on the host."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def nested(index, layout):
    return torch.nested.nested_tensor(
        [torch.full((n + 1,), float(index)) for n in range(3)], layout=layout
    )


KINDS = {
    "COO": lambda index: (torch.eye(64) * (index + 1)).to_sparse(),
    "CSR": lambda index: (torch.eye(64) * (index + 1)).to_sparse_csr(),
    "CSC": lambda index: (torch.eye(64) * (index + 1)).to_sparse_csc(),
    "BSR": lambda index: (torch.eye(64) * (index + 1)).to_sparse_bsr((2, 2)),
    "nested": lambda index: nested(index, torch.strided),
    "jagged": lambda index: nested(index, torch.jagged),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sparse_and_nested_batches_hold_what_they_should(kind):
    make = KINDS[kind]
    loader = DataLoader(list(range(6)), batch_size=None, collate_fn=make)
    prepared = Accelerator().prepare(loader)
    for index, batch in enumerate(prepared):
        assert batch.is_cuda
        busy(0.02)  # memory that is given back too early would be used for the next copy
        wanted = make(index)
        if wanted.is_nested:
            assert [row.tolist() for row in batch.unbind()] == [r.tolist() for r in wanted.unbind()]
        else:
            assert torch.equal(batch.to_dense().cpu(), wanted.to_dense())


def test_each_pass_uses_the_memory_of_the_one_before():
    accel = Accelerator()
    loader = accel.prepare(DataLoader(torch.randn(4, 64, 1024, 64), 1, pin_memory=True))
    reserved = []
    for _ in range(12):
        for batch in loader:
            batch.sum()
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    # A stream for each pass would hold two or three batches of 16 MiB more after each.
    assert reserved[-1] <= reserved[1] + (64 << 20)


class Encoding(collections.UserDict):
    """As a BatchEncoding of transformers."""

    def to(self, device, non_blocking=False):
        self.data = {k: v.to(device, non_blocking=non_blocking) for k, v in self.data.items()}
        return self


class Graph:
    """An object with tensors in its attributes."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, name):
        return self.data[name]

    def to(self, device, non_blocking=False):
        return Graph({k: v.to(device, non_blocking=non_blocking) for k, v in self.data.items()})


@pytest.mark.parametrize("kind", [dict, Encoding, Graph])
def test_the_host_does_not_wait_for_the_computation_to_copy_a_batch(kind):
    # Pageable memory: a copy on the computing stream would wait for all that is queued there.
    rows = [torch.full((1 << 18,), index) for index in range(12)]
    loader = DataLoader(rows, 2, collate_fn=lambda some: kind({"x": torch.stack(some)}))
    prepared = Accelerator().prepare(loader)
    list(prepared)  # the stream and its memory are there
    batches = iter(prepared)
    next(batches)
    torch.cuda.synchronize()
    busy(4.0)
    computed = torch.cuda.Event()
    computed.record()
    sums = [batch["x"].sum() for batch in batches]
    assert not computed.query(), "the loop ended while the device was still busy"
    assert [one.item() >> 18 for one in sums] == [5, 9, 13, 17, 21]


@pytest.mark.parametrize("seedable", [False, True], ids=["in order", "seedable sampler"])
@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_work_with_the_gpu_as_default_device(seedable, workers):
    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    torch.set_default_device("cuda")
    try:
        accel = Accelerator(dataloader_config=config)

        def prepare():
            return accel.prepare(
                DataLoader(
                    ["a", "b", "c", "d"],
                    2,
                    shuffle=seedable,
                    num_workers=workers,
                    # CUDA cannot be used in a fork, and workers use the default device.
                    multiprocessing_context="spawn" if workers else None,
                )
            )

        loader = prepare()
        for _ in range(2):
            assert sorted(chain.from_iterable(loader)) == ["a", "b", "c", "d"]
        loader.trained = True
        batches = iter(loader)
        first = next(batches)
        resumed = prepare()
        resumed.load_state_dict(loader.state_dict())
        assert sorted(chain(first, *resumed)) == ["a", "b", "c", "d"]
    finally:
        torch.set_default_device(None)


def test_the_gpu_that_the_script_has_chosen_is_kept():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    done = run_script(
        """
        torch.cuda.set_device(1)
        print(Accelerator().device, torch.cuda.current_device())
        """
    )
    assert done.split() == ["cuda:1", "1"]


def run_script(body, *launcher):
    header = "import torch\nfrom accel_callbacks import Accelerator\n"
    code = header + textwrap.dedent(body)
    variables = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK")}
    done = subprocess.run(
        [sys.executable, *(launcher or ("-c", code))],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_two_processes_share_a_gpu_with_gloo(tmp_path):
    script = tmp_path / "share.py"
    script.write_text(
        textwrap.dedent(
            """
            import os

            os.environ["CUDA_VISIBLE_DEVICES"] = "0"

            import torch
            from accel_callbacks import Accelerator, InitProcessGroupKwargs

            accel = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
            model = torch.nn.Linear(1, 1)
            model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            inputs = torch.full((1, 1), accel.process_index + 1.0, device=accel.device)
            accel.backward(model(inputs).sum())
            optimizer.step()
            both = accel.gather(model.module.weight.detach().flatten())
            if accel.is_main_process:
                print(accel.device, bool(both[0] == both[1]))
            """
        )
    )
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)
    assert run_script("", *launcher).split() == ["cuda:0", "True"]
