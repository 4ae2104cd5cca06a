"""The checks of an installation: processes, collectives, data, arithmetic, checkpoints."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import checkpoint_io
from accel_callbacks import __version__, collectives
from accel_callbacks.accelerator import Accelerator
from accel_callbacks.addons.selftest.check import Check, Expectations, Lab, Skipped
from accel_callbacks.distributed.rng import set_seed
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.options import AcceleratorConfig
from checkpoint_io.format import MANIFEST, new_save_id
from checkpoint_io.storage import open_store

__all__ = [
    "CHECKS",
    "Trainee",
    "accumulation_equals_one_batch",
    "collectives_carry_values",
    "differing_ranks",
    "every_sample_once",
    "flat_weights",
    "gradients_average",
    "precision_holds",
    "repeats",
    "resume_is_exact",
    "samples",
    "small_model",
    "topology_is_whole",
    "train_plainly",
    "workers_deliver",
]

_MANY = 1 << 20
_BATCH = 4
_WIDE = 1 << 16
_ROUNDING = 1e-4
_COMPUTED_IN = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LOW_ROUNDING = {"no": 1e-2, "fp16": 1e-2, "bf16": 4e-2, "fp8": 0.2}
_SAVE_AFTER = 2
_BATCHES = 5


def small_model(seed: int = 3, dropout: float = 0.0, stages: int = 1) -> nn.Sequential:
    """Return a small model whose initial weights depend on the seed alone.

    Args:
        seed: of the weights.
        dropout: probability of the dropout layer.
        stages: number of stages of a pipeline that its layers must be enough for.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)
        )
        _lengthen(model, stages, width=4)
    return _with_plan(model, first="0", last="4")


def _lengthen(model: nn.Sequential, stages: int, width: int) -> None:
    """Append layers until each stage of a pipeline can have one."""
    while len(model) < stages:
        model.append(nn.Linear(width, width))


def _with_plan(model: nn.Sequential, first: str, last: str) -> nn.Sequential:
    """Give a model a plan of tensor parallelism, whose layers any number of ranks can share."""
    plan: Any = {first: "colwise_gather_output", last: "embedding_rowwise"}
    model._tp_plan = plan
    return model


def samples(count: int) -> TensorDataset:
    """Return inputs and targets, the same on all ranks."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator, device="cpu")
    return TensorDataset(inputs, inputs[:, :4] * 2 - 1)


def train_plainly(
    windows: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device, stages: int = 1
) -> torch.Tensor:
    """Train in plain torch on one process, a step per window; return the weights."""
    model = small_model(stages=stages).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in windows:
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return flat_weights(model)


def flat_weights(model: nn.Module) -> torch.Tensor:
    """Return all parameters of a model that is whole on this rank, flattened."""
    return _flat(model.parameters())


def _flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


class Trainee(NamedTuple):
    """A model as this run trains it: in stages under a pipeline, else as ``prepare`` returns it.

    Attributes:
        model: prepared.
        loss: the mean squared error of a batch of inputs and targets.
    """

    model: nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @classmethod
    def prepare(cls, accel: Accelerator, model: nn.Sequential, *others: Any) -> tuple[Any, ...]:
        """Collective: return the trainee of a model, and prepared what is trained with it.

        Args:
            accel: of the run.
            model: with at least as many layers as there are stages.
            *others: its optimizer, and loaders.
        """
        stages = _stages(accel)
        if stages == 1:
            prepared, *ready = accel.prepare(model, *others)
            return cls(prepared, lambda inputs, targets: _error(prepared(inputs), targets)), *ready
        points = [str(number * len(model) // stages) for number in range(1, stages)]
        pipeline = accel.prepare_pipeline(model, points, _error)
        ready = [accel.prepare(other) for other in others]
        return cls(pipeline, lambda inputs, targets: pipeline(inputs, target=targets)), *ready

    def weights(self, accel: Accelerator) -> torch.Tensor:
        """Collective: return all parameters, gathered and flattened, on the device."""
        state = accel.get_state_dict(self.model, all_ranks=True)
        named = accel.unwrap_model(self.model).named_parameters()
        return _flat(state[name] for name, _ in named).to(accel.device)


def _error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs.float(), targets)


def _stages(accel: Accelerator) -> int:
    """Return the number of stages of a pipeline, 1 without one."""
    parallelism = accel.parallelism_config
    return parallelism.sizes["pp"] if parallelism is not None and parallelism.pp_enabled else 1


def _rows(accel: Accelerator) -> int:
    """Return the rows of a batch, of which each stage of a pipeline has some at a time."""
    return _BATCH * _stages(accel)


def differing_ranks(rows: torch.Tensor) -> Iterator[int]:
    """Yield the ranks whose row differs from that of rank 0."""
    return (rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0]))


def topology_is_whole(lab: Lab) -> str:
    """Check that each rank exists once, on its own device, with the same software and settings."""
    accel, config = lab.accelerator(), lab.config
    topology = accel.topology
    everyone = collectives.all_objects(_facts(topology, config))
    expect = Expectations()
    ranks = [facts["rank"] for facts in everyone]
    expect.equal("the list of ranks", ranks, list(range(topology.world_size)))
    for name in ("torch", "accel-callbacks", "python", "precision", "accumulation", "kind"):
        values = {str(facts[name]) for facts in everyone}
        expect.that(len(values) == 1, f"processes differ in {name}: {', '.join(sorted(values))}")
    if topology.device.type != "cpu":
        used = Counter((facts["host"], facts["device"]) for facts in everyone)
        shared = [f"{device} of {host}" for (host, device), n in used.items() if n > 1]
        expect.that(not shared, f"processes share {', '.join(shared)}")
    expect.done()
    machines = len({facts["host"] for facts in everyone})
    backend = f", {topology.backend}" if topology.backend else ""
    notes = sorted({facts["note"] for facts in everyone if facts["note"]})
    return (
        f"{_count(topology.world_size, 'process', 'es')} on {_count(machines, 'machine')}, "
        f"{_devices(everyone)}{backend}, precision {config.mixed_precision}{_mesh(accel)}"
        + "".join(f"; {note}" for note in notes)
    )


def _mesh(accel: Accelerator) -> str:
    """Describe how the ranks are arranged, if models are sharded or replicas have a mesh."""
    mesh = accel.torch_device_mesh
    if mesh is None:
        return ""
    sizes = zip(mesh.mesh_dim_names, mesh.shape, strict=True)
    return ", " + " x ".join(f"{axis} {size}" for axis, size in sizes)


def _facts(topology: Topology, config: AcceleratorConfig) -> dict[str, Any]:
    """Return what the ranks compare."""
    return {
        "rank": topology.rank,
        "host": f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}",
        "device": str(topology.device),
        "kind": topology.device.type,
        "gpu": torch.cuda.get_device_name(topology.device)
        if topology.device.type == "cuda"
        else "",
        "note": _capability_note(topology.device),
        "torch": torch.__version__,
        "accel-callbacks": __version__,
        "python": platform.python_version(),
        "precision": config.mixed_precision,
        "accumulation": config.gradient_accumulation_steps,
    }


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number != 1 else ''}"


def _devices(everyone: Sequence[Mapping[str, Any]]) -> str:
    """Describe the devices of all ranks."""
    kind = str(everyone[0]["kind"])
    gpus = Counter(facts["gpu"] for facts in everyone if facts["gpu"])
    named = (f"{n} x {name}" if n > 1 else name for name, n in gpus.items())
    return f"{kind} ({', '.join(named)})" if gpus else kind


def _capability_note(device: torch.device) -> str:
    """Describe the low precisions that an NVIDIA GPU lacks."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    capability = torch.cuda.get_device_capability(device)
    text = f"compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return f"{text}: bf16 is emulated, slowly, so take fp16, and there is no fp8"
    return f"{text}: no fp8" if capability < (8, 9) else ""


def collectives_carry_values(lab: Lab) -> str:
    """Check the exact results of every kind of collective, small and large."""
    accel = lab.accelerator()
    rank, world = accel.process_index, accel.num_processes
    expect = Expectations()
    ranks = torch.arange(float(world), device=accel.device)
    mine = torch.full((2,), float(rank), device=accel.device)
    expect.equal("gather", collectives.gather(mine), ranks.repeat_interleave(2))
    total = world * (world - 1) / 2
    expect.equal("reduce sum", collectives.reduce(mine, "sum"), [total, total])
    expect.equal("reduce mean", collectives.reduce(mine, "mean"), [total / world] * 2)
    expect.equal("broadcast", collectives.broadcast(mine, world - 1), [world - 1.0] * 2)
    padded = collectives.pad_across_processes(torch.ones(rank + 1, device=accel.device))
    expect.equal("pad_across_processes", padded, [1.0] * (rank + 1) + [0.0] * (world - rank - 1))
    objects = collectives.gather_object({"rank": rank})
    expect.equal("gather_object", objects, [{"rank": rank} for rank in range(world)])
    sent = collectives.broadcast_object(f"from {rank}", 0)
    expect.equal("broadcast_object", sent, "from 0")
    many = torch.arange(_MANY, dtype=torch.int64, device=accel.device) * (rank + 1)
    summed = collectives.reduce(many, "sum")
    first = torch.arange(_MANY, dtype=torch.int64, device=accel.device)
    expect.equal("reduce of 8 MB", summed, first * (world * (world + 1) // 2))
    backend = _all_reduce_on_device(expect, accel.device, rank, world)
    accel.wait_for_everyone()
    expect.done()
    return f"gather, reduce, broadcast, pad, objects, 8 MB{backend}"


def _all_reduce_on_device(expect: Expectations, device: torch.device, rank: int, world: int) -> str:
    """Sum gradients of some megabytes as DDP does; return the words for the backend."""
    if world == 1:
        return ""
    buckets = [torch.full((_MANY,), rank + 1.0, device=device) for _ in range(4)]
    works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
    for work, bucket in zip(works, buckets, strict=True):
        work.wait()
        total = torch.full_like(bucket, world * (world + 1) / 2)
        expect.equal("all_reduce on the device", bucket, total)
    return f", all_reduce on {device.type} by {_backend_of(device)}"


def _backend_of(device: torch.device) -> str:
    """Return the name of the backend that carries the tensors of a device."""
    named = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(",") if ":" in pair)
    return str(named.get(device.type, dist.get_backend()))


def every_sample_once(lab: Lab) -> str:
    """Check two shuffled epochs over a number of samples that the ranks do not divide."""
    accel = lab.accelerator()
    count = 2 * _BATCH * accel.num_processes + 3
    numbers: Any = range(count)
    loader = accel.prepare(DataLoader(numbers, _BATCH, shuffle=True))
    epochs = [
        [int(n) for batch in loader for n in accel.gather_for_metrics(batch)] for _ in range(2)
    ]
    expect = Expectations()
    for number, seen in enumerate(epochs, 1):
        lost = sorted(set(range(count)) - set(seen))
        twice = sorted({n for n in seen if seen.count(n) > 1})
        expect.that(not lost, f"epoch {number} lost samples {lost[:5]}")
        expect.that(not twice, f"epoch {number} had samples {twice[:5]} more than once")
    expect.that(epochs[0] != epochs[1], "the second epoch had the order of the first")
    expect.done()
    return f"{count} samples, two epochs, none lost, none twice"


def workers_deliver(lab: Lab) -> str:
    """Check that large batches from worker processes arrive intact."""
    accel = lab.accelerator()
    count = 3 * accel.num_processes
    # Half a megabyte each, which a worker sends through shared memory.
    wide = torch.arange(count, device="cpu")[:, None].expand(count, _WIDE)
    loader = accel.prepare(DataLoader(TensorDataset(wide), 1, num_workers=1))
    expect, seen = Expectations(), []
    for (batch,) in loader:
        number = int(batch[0, 0])
        expect.that(bool((batch == number).all()), f"sample {number} came with other values")
        seen += accel.gather_for_metrics(batch.amax(dim=1)).tolist()
    expect.equal("samples of the workers", sorted(seen), list(range(count)))
    expect.done()
    return "one worker a process, through shared memory"


def repeats(lab: Lab) -> str:
    """Check that the same seed gives the same weights, twice on this rank and on all ranks."""
    accel = lab.accelerator()
    rows = [_three_steps(accel.device), _three_steps(accel.device)]
    numbers = accel.gather(rows[0][None])
    expect = Expectations()
    expect.that(torch.equal(rows[0], rows[1]), "the same seed gave other weights the second time")
    differ = list(differing_ranks(numbers))
    expect.that(not differ, f"ranks {differ} do not compute what rank 0 does")
    expect.done()
    return "same seed, same weights, bit by bit"


def _three_steps(device: torch.device) -> torch.Tensor:
    """Train with dropout from a fixed seed; return the weights."""
    model = small_model(dropout=0.5)
    set_seed(5)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(8, 8, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat_weights(model)


def precision_holds(lab: Lab) -> str:
    """Check the dtype of layers, their distance to fp32, and that training lowers the loss."""
    accel = lab.configured()
    name = accel.config.mixed_precision
    generator = torch.Generator(device="cpu").manual_seed(2)
    left, right = torch.randn(2, 64, 64, generator=generator, device="cpu").to(accel.device)
    with accel.autocast():
        product = left @ right
    expect = Expectations()
    wanted = _COMPUTED_IN.get(name)
    expect.that(wanted in (None, product.dtype), f"products are {product.dtype}, not {wanted}")
    expect.close("products and those of fp32", product.float(), left @ right, _LOW_ROUNDING[name])
    before, after, losses = _train(accel)
    expect.that(bool(after.isfinite().all()), "weights became infinite or not a number")
    expect.that(not torch.equal(before, after), "no step changed the weights")
    expect.that(losses[-1] < losses[0], f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}")
    expect.done()
    return f"{name}: {str(product.dtype).removeprefix('torch.')} products, loss falls"


def _train(accel: Accelerator) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Take twelve steps on one batch; return the weights before and after, and the losses."""
    layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    _lengthen(layers, _stages(accel), width=16)
    inner = _with_plan(layers, first="0", last="2").to(accel.device)
    adam = torch.optim.Adam(inner.parameters(), lr=0.02)
    trainee, optimizer = Trainee.prepare(accel, inner, adam)
    before = trainee.weights(accel)
    generator = torch.Generator(device="cpu").manual_seed(4)
    batch = torch.randn(32, 16, generator=generator, device="cpu").to(accel.device)
    losses = []
    for _ in range(12 * accel.config.gradient_accumulation_steps):
        with accel.accumulate(trainee.model):
            with accel.autocast():
                loss = trainee.loss(batch, batch)
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return before, trainee.weights(accel), losses


def gradients_average(lab: Lab) -> str:
    """Check that training on shares gives the weights of one process with the whole batch."""
    accel = lab.accelerator()
    step = _rows(accel) * accel.data_world
    count = 4 * step
    expect = Expectations()
    mine, rows = _train_epoch(accel, count)
    whole = [samples(count)[n : n + step] for n in range(0, count, step)]
    alone = train_plainly(whole, accel.device, _stages(accel))
    expect.close("weights and those of one process", mine, alone, _ROUNDING)
    differ = list(differing_ranks(rows))
    expect.that(not differ, f"ranks {differ} have other weights than rank 0")
    expect.done()
    return "4 steps, as one process with the whole batch"


def accumulation_equals_one_batch(lab: Lab) -> str:
    """Check that micro-batches give the weights of whole windows, with a short last window."""
    window = max(2, lab.config.gradient_accumulation_steps)
    accel = lab.accelerator(gradient_accumulation_steps=window)
    step = _rows(accel) * accel.data_world
    count = step * (window + window // 2)
    expect = Expectations()
    mine, _ = _train_epoch(accel, count)
    whole = [samples(count)[n : n + step * window] for n in range(0, count, step * window)]
    alone = train_plainly(whole, accel.device, _stages(accel))
    expect.close("weights and those of whole windows", mine, alone, _ROUNDING)
    expect.done()
    return f"windows of {window} and {window // 2} micro-batches, as whole batches"


def _train_epoch(accel: Accelerator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Train for an epoch; return the weights, and those of all ranks."""
    inner = small_model(stages=_stages(accel))
    sgd = torch.optim.SGD(inner.parameters(), lr=0.1)
    batches = DataLoader(samples(count), _rows(accel))
    trainee, optimizer, loader = Trainee.prepare(accel, inner, sgd, batches)
    for inputs, targets in loader:
        with accel.accumulate(trainee.model):
            accel.backward(trainee.loss(inputs, targets))
            optimizer.step()
            optimizer.zero_grad()
    weights = trainee.weights(accel)
    return weights, accel.gather(weights[None])


def resume_is_exact(lab: Lab) -> str:
    """Check that resumed training ends with exactly the weights of uninterrupted training."""
    accel = lab.accelerator()
    if lab.folder is None:
        raise Skipped("several machines: name a folder that all of them see with --folder")
    with _own_folder(lab.folder) as folder:
        set_seed(7, device_specific=True)
        parts = _prepare(accel, seed=3)
        straight, left = _train_and_save(accel, parts, save_to=folder)
        if accel.is_main_process:
            checkpoint_io.verify(folder)
        again = lab.accelerator()
        set_seed(8, device_specific=True)
        parts = _prepare(again, seed=4)
        again.load_state(folder)
        resumed, left_again = _train_and_save(again, parts)
        manifest = checkpoint_io.read_manifest(folder)
        collectives.barrier()  # all ranks have read: the folder may be removed
    expect = Expectations()
    expect.equal("the batches after the resume", left_again, left)
    expect.that(torch.equal(straight, resumed), "weights after the resume differ")
    expect.done()
    files = len(manifest.files)
    return f"saved in mid-epoch, verified, resumed bit by bit ({files} files in {lab.folder})"


def _prepare(accel: Accelerator, seed: int) -> tuple[Any, ...]:
    """Prepare a model, an optimizer and a shuffled loader."""
    model = small_model(seed, dropout=0.5, stages=_stages(accel))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = samples(_rows(accel) * _BATCHES * accel.data_world)
    loader = DataLoader(data, _rows(accel), shuffle=True)
    return Trainee.prepare(accel, model, optimizer, loader)


def _train_and_save(
    accel: Accelerator, parts: tuple[Any, ...], save_to: str | None = None
) -> tuple[torch.Tensor, list[float]]:
    """Train to the end of the epoch; return the weights, and the batch sums since the save."""
    trainee, optimizer, loader = parts
    seen = []
    for number, (inputs, targets) in enumerate(loader, 1):
        accel.backward(trainee.loss(inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(inputs.sum()))
        if save_to is not None and number == _SAVE_AFTER:
            accel.save_state(save_to)
            seen.clear()
    return trainee.weights(accel), seen


@contextmanager
def _own_folder(base: str) -> Iterator[str]:
    """Yield a new folder for this check, the same on all ranks, and remove it afterwards."""
    name = collectives.broadcast_object(f"accel-test-{new_save_id()}", 0)
    folder = f"{base.rstrip('/')}/{name}"
    try:
        yield folder
    finally:
        if collectives.rank() == 0:
            _remove(folder)


def _remove(folder: str) -> None:
    """Remove the checkpoint and the folder."""
    with suppress(Exception):  # problems with the folder have failed the check already
        store = open_store(folder)
        store.remove_many([MANIFEST, *(name for name in store.sizes() if name != MANIFEST)])
        store.remove_folder()


_ALL = (
    Check(
        "processes",
        topology_is_whole,
        "install the same versions on all machines, and start one process for each GPU; "
        "`accel launch --dry_run` shows what is started",
    ),
    Check(
        "collectives",
        collectives_carry_values,
        "test the network and its driver: --cpu takes gloo in place of the GPUs; NCCL_DEBUG=INFO "
        "shows what NCCL does; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 leave out a broken path; "
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME name the interface",
    ),
    Check(
        "determinism",
        repeats,
        "run again: if it varies, check for other work on the device, and for its health (ECC "
        "errors); if only some ranks differ, they have other hardware or versions",
    ),
    Check(
        "data",
        every_sample_once,
        "check for installed packages that patch torch's DataLoader; report it with the "
        "output of `accel env`",
    ),
    Check(
        "workers",
        workers_deliver,
        "give the container more shared memory (docker run --shm-size=8g), or train with "
        "num_workers=0",
    ),
    Check(
        "precision",
        precision_holds,
        "choose another --mixed_precision: bf16 needs an Ampere GPU or newer, fp8 a Hopper one "
        "and torchao",
    ),
    Check(
        "gradients",
        gradients_average,
        "do not train like this: gradients of the processes are not averaged. Update torch and "
        "the driver, then check the collectives above",
    ),
    Check(
        "accumulation",
        accumulation_equals_one_batch,
        "do not accumulate gradients like this; report it with the output of `accel env`",
    ),
    Check(
        "checkpoint",
        resume_is_exact,
        "check the free space and permissions of the folder; --folder names another, which all "
        "processes must be able to access (a local path or any fsspec URL)",
    ),
)

CHECKS: Mapping[str, Check] = {check.name: check for check in _ALL}
