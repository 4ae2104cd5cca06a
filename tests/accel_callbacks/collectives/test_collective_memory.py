"""What collectives send and allocate, on two processes: one block a gather, bounded averages."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

from accel_callbacks import Accelerator, LocalSGD, gather, local_sgd, reduce
from accel_callbacks.collectives import tensors
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator() -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND)


# torch 2.13 renamed it.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@contextlib.contextmanager
def counted(*names: str):
    """The real collectives, and a list of the calls of each."""
    real = {name: getattr(dist, name) for name in names}
    seen: list[tuple[str, int]] = []

    def watched(name):
        def call(*args, **kwargs):
            sent = args[1] if name.startswith("all_gather") else args[0]
            seen.append((name, sent.numel()))
            return real[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, watched(name))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def values(rank: int) -> dict:
    base = torch.arange(6).reshape(3, 2) + 10 * rank
    return {
        "float": base.float(),
        "double": base.double(),
        "half": base.half(),
        "bf16": base.bfloat16(),
        "complex": torch.complex(base.float(), -base.float()),
        "bool": base % 3 == 0,
        "bytes": base.to(torch.uint8),
        "long": base,
        "transposed": base.t(),
        "scalar": torch.tensor(rank + 0.5),
        "none": torch.empty(0, 3),
    }


def gathers(lacks: bool) -> list:
    me = accelerator().process_index
    real = getattr(dist, GATHER)

    def unsupported(*args, **kwargs):
        raise RuntimeError("Backend mpi does not support _allgather_base")

    if lacks:
        setattr(dist, GATHER, unsupported)
    try:
        with counted("all_gather", *([] if lacks else [GATHER])) as seen:
            got = gather(values(me))
    finally:
        setattr(dist, GATHER, real)
    both = [values(0), values(1)]
    wrong = []
    for name, one in got.items():
        wanted = torch.cat([each[name].reshape(each[name].shape or (1,)) for each in both])
        if one.dtype != wanted.dtype or not torch.equal(one, wanted):
            wrong.append(name)
    return [wrong, sorted({name for name, _ in seen})]


def test_every_dtype_is_gathered_into_one_block(pool):
    assert pool.run(gathers, False) == [[[], [GATHER]]] * 2


def test_a_backend_without_that_collective_takes_the_list(pool):
    assert pool.run(gathers, True) == [[[], ["all_gather"]]] * 2


def uneven() -> list:
    me = accelerator().process_index
    return gather(torch.full((me + 1, 2), me, dtype=torch.bool)).int().tolist()


def test_uneven_rows_are_gathered_into_one_block_too(pool):
    assert pool.run(uneven) == [[[0, 0], [1, 1], [1, 1]]] * 2


def another_error() -> str:
    accelerator()
    real = getattr(dist, GATHER)

    def broken(*args, **kwargs):
        raise RuntimeError("Connection closed by peer")

    setattr(dist, GATHER, broken)
    try:
        gather(torch.ones(1))
    except Exception as error:
        return str(error)
    finally:
        setattr(dist, GATHER, real)
    return "no error"


def test_another_error_of_the_gather_is_an_error(pool):
    assert all("Connection closed" in text for text in pool.run(another_error))


# --- weights that are numbers ------------------------------------------------------------------


def weighted_numbers() -> list:
    """Reduce by a number; return the tensors that were made of numbers meanwhile."""
    me = accelerator().process_index
    made: list[tuple] = []
    as_tensor, new = torch.as_tensor, torch.tensor

    def watched(function):
        def make(data, *args, **kwargs):
            if isinstance(data, float):
                made.append((function.__name__, str(kwargs.get("device"))))
            return function(data, *args, **kwargs)

        return make

    torch.as_tensor, torch.tensor = watched(as_tensor), watched(new)
    try:
        mean = reduce(as_tensor([1.0, 3.0]) * (me + 1), "mean", weight=[0.25, 0.75][me])
        whole = reduce(as_tensor(float("nan")) if me else as_tensor(2.0), weight=1.0 - me)
        double = reduce(as_tensor([1.0 / 3], dtype=torch.float64), weight=[0.1, 0.3][me])
    finally:
        torch.as_tensor, torch.tensor = as_tensor, new
    return [mean.tolist(), whole.item(), double.item(), sorted(set(made))]


def test_a_weight_that_is_a_number_is_made_no_tensor_of_the_device(pool):
    for mean, whole, double, made in pool.run(weighted_numbers):
        assert mean == [1.75, 5.25]
        assert whole == 2.0
        assert double == pytest.approx(1 / 3, rel=1e-15)
        # Only the sum of the weights, on the host.
        assert made == [("tensor", "cpu")]


def test_a_sum_on_the_host_divides_as_a_number():
    share = torch.tensor(4.0, dtype=torch.float64)
    assert tensors._beside(share, torch.ones(2, device="meta")) == 4.0
    assert tensors._beside(share, torch.ones(2)).dtype is torch.float32


# --- LocalSGD ----------------------------------------------------------------------------------


class Several(torch.nn.Module):
    """Parameters around the size of a piece, and some that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (3,), "b": (5, 4), "c": (1,), "d": (7,), "e": (2, 3)}.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape)))
        self.turned = torch.nn.Parameter(torch.zeros(4, 5).t())
        self.low = torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16).reshape(3, 3).t())
        self.complex = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("strided", torch.zeros(6)[::2])
        self.register_buffer("nothing", torch.zeros(0))


def filled(rank: int) -> torch.nn.Module:
    model = Several()
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            real = torch.view_as_real(one) if one.is_complex() else one
            real.copy_(torch.randn(real.shape, generator=generator) * 3)
    return model


def averages(piece: int) -> list:
    accel = accelerator()
    model = accel.prepare(Several())
    before = local_sgd._AVERAGED_TOGETHER
    local_sgd._AVERAGED_TOGETHER = piece
    try:
        with counted("all_reduce") as seen, LocalSGD(accel, model, 1) as sgd:
            own = filled(accel.process_index)
            with torch.no_grad():
                for name, to in _tensors(accel, model):
                    to.copy_(own.state_dict()[name])
            sgd.step()
    finally:
        local_sgd._AVERAGED_TOGETHER = before
    exact = [
        [name, torch.view_as_real(one).tolist() if one.is_complex() else one.float().tolist()]
        for name, one in _tensors(accel, model)
    ]
    return [[n for _, n in seen], exact]


def _tensors(accel, model) -> list:
    return list(accel.unwrap_model(model).state_dict().items())


@pytest.mark.parametrize("piece", [1 << 24, 8, 1])
def test_averages_in_pieces_are_those_of_all_at_once(pool, piece):
    own = [filled(rank).state_dict() for rank in range(2)]
    wanted = []
    for name, first in own[0].items():
        low, one, other = first.dtype, first, own[1][name]
        if first.is_complex():
            one, other = torch.view_as_real(one), torch.view_as_real(other)
        mean = one.float() / 2 + other.float() / 2
        mean = mean.to(low) if not low.is_complex else mean
        wanted.append([name, mean.float().tolist()])
    total = 3 + 20 + 1 + 7 + 6 + 20 + 9 + 6 + 3
    for sizes, exact in pool.run(averages, piece):
        assert exact == wanted
        assert sum(sizes) == total
        assert max(sizes) <= piece
        assert len(sizes) == -(-total // piece)
