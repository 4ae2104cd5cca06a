"""Saved on some ranks in one layout, loaded on others in another: bit for bit, and only its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import (
    CheckpointReader,
    StateMismatchError,
    TorchGroup,
    load,
    open_checkpoint,
    read_manifest,
    save,
)
from checkpoint_io.storage.local import LocalStore
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed

MIB = 1 << 20
SHAPES = {
    "even": (8, 6), "uneven": (7, 5), "few": (2, 3), "line": (11,), "cube": (3, 4, 5),
    "number": (), "none": (0, 3), "wide": (6, 200_000),
}  # fmt: skip
# a mesh and, for each of its dimensions, the dimension of the tensor that is split (-1: none)
LAYOUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "rows": ("line", (0,)),
    "columns": ("line", (1,)),
    "copies": ("line", (-1,)),
    "grid": ("square", (0, 1)),
    "hybrid": ("square", (-1, 0)),
    "twice": ("square", (0, 0)),
}
TARGETS = ("rows", "columns", "copies", "grid", "hybrid", "twice", "plain")


def full(name: str) -> torch.Tensor:
    shape = torch.Size(SHAPES[name])
    return torch.arange(1.0, 1 + shape.numel()).reshape(shape)


def join() -> TorchGroup:
    from accel_callbacks.distributed.topology import resolve_topology

    resolve_topology(cpu=True, timeout=BOUND)
    return TorchGroup()


def meshes() -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    return {
        "line": init_device_mesh("cpu", (world,)),
        "square": init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp")),
    }


def tensors_in(layout: str, made: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors in one layout; a dimension that a tensor lacks is replicated instead."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if layout == "plain":
        return {name: full(name) for name in SHAPES}
    mesh, dims = LAYOUTS[layout]
    found = {}
    for name, shape in SHAPES.items():
        places = [Shard(d) if 0 <= d < len(shape) else Replicate() for d in dims]
        found[name] = distribute_tensor(full(name), made[mesh], places)
    return found


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def save_all(folder: str) -> None:
    group, made = join(), meshes()
    state = {layout: tensors_in(layout, made) for layout in TARGETS}
    save(Path(folder), {**state, "step": 3}, group=group)


def load_all(folder: str) -> list[str]:
    """Every saved layout into every other one; what came out wrong."""
    join()
    made, wrong = meshes(), []
    for target in TARGETS:
        expected = tensors_in(target, made)
        for saved in TARGETS:
            mine = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            state = load(Path(folder), into={saved: mine}, only=f"{saved}/*").state
            for name, tensor in mine.items():
                if not torch.equal(local(tensor), local(expected[name])):
                    wrong.append(f"{name}: {saved} into {target}")
                if state[saved][name] is not tensor:
                    wrong.append(f"{name}: not the tensor that was passed")
    return wrong


def check_single(folder: Path) -> None:
    """One process without a process group: everything, and slices across the ranks' chunks."""
    state = load(folder).state
    reader = open_checkpoint(folder)
    index = (slice(1, 5, 2), slice(49_999, 150_001))
    for layout in TARGETS:
        for name in SHAPES:
            assert torch.equal(state[layout][name], full(name)), (layout, name)
        assert torch.equal(reader[f"{layout}/wide"][index], full("wide")[index])
        target = torch.zeros(5, 7).t()
        assert torch.equal(reader[f"{layout}/uneven"].read_into(target), full("uneven"))


@pytest.fixture(scope="module")
def saved_by_4(pool_of_4: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by4")
    pool_of_4.run(save_all, str(folder))
    return folder


def test_four_ranks_to_one_process(saved_by_4: Path) -> None:
    check_single(saved_by_4)


def test_four_ranks_to_four(pool_of_4: Any, saved_by_4: Path) -> None:
    assert pool_of_4.run(load_all, str(saved_by_4)) == [[]] * 4


def test_four_ranks_to_two(pool: Any, saved_by_4: Path) -> None:
    assert pool.run(load_all, str(saved_by_4)) == [[]] * 2


def test_two_ranks_to_four_and_one(pool: Any, pool_of_4: Any, tmp_path: Path) -> None:
    pool.run(save_all, str(tmp_path))
    check_single(tmp_path)
    assert pool_of_4.run(load_all, str(tmp_path)) == [[]] * 4


def test_one_process_to_four(pool_of_4: Any, tmp_path: Path) -> None:
    save(tmp_path, {layout: {name: full(name) for name in SHAPES} for layout in TARGETS})
    assert pool_of_4.run(load_all, str(tmp_path)) == [[]] * 4


# --- how little each rank reads ------------------------------------------------------------


class Counting(LocalStore):
    """Notes how many bytes were asked for."""

    nbytes = 0

    def fetch(self, spans: Any, deliver: Any) -> None:
        self.nbytes += sum(span.end - span.begin for span in spans)
        super().fetch(spans, deliver)


def bytes_read(folder: str, layout: str) -> tuple[int, int]:
    """Bytes that this rank reads for one large tensor, and bytes that it holds of it."""
    from torch.distributed.tensor import Replicate, Shard, empty

    join()
    mesh, dims = LAYOUTS[layout]
    places = [Shard(d) if d >= 0 else Replicate() for d in dims]
    store = Counting(folder)
    view = CheckpointReader(store, read_manifest(folder))["big"]
    target = empty(view.shape, device_mesh=meshes()[mesh], placements=places)
    store.nbytes = 0
    view.read_into(target)
    return store.nbytes, target.to_local().nbytes


def test_each_rank_reads_only_its_own(pool_of_4: Any, tmp_path: Path) -> None:
    save(tmp_path, {"big": torch.randn(8 * MIB // 1024, 1024)})  # 32 MiB, in rows of 4 KiB
    for read, held in pool_of_4.run(bytes_read, str(tmp_path), "rows"):
        assert read == held == 8 * MIB
    for read, held in pool_of_4.run(bytes_read, str(tmp_path), "hybrid"):
        assert read == held == 16 * MIB


# --- what does not fit ---------------------------------------------------------------------


def load_misfits(folder: str) -> list[str]:
    """What is said about a DTensor of another shape or dtype, or that is not whole yet."""
    from torch.distributed.tensor import DTensor, Partial, zeros

    join()
    mesh = meshes()["line"]
    tensors = [
        zeros((8, 7), device_mesh=mesh),
        zeros((8, 6), dtype=torch.float16, device_mesh=mesh),
        DTensor.from_local(torch.zeros(8, 6), mesh, [Partial()], run_check=False),
    ]
    said = []
    for tensor in tensors:
        try:
            load(Path(folder), into={"t": tensor})
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_targets_that_do_not_fit(pool: Any, tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(8, 6)})
    for said in pool.run(load_misfits, str(tmp_path)):
        assert len(said) == 3
        assert all(text.startswith(StateMismatchError.__name__) for text in said)
        assert "redistribute" in said[2]


def load_onto_some(folder: str) -> list[Any]:
    """A DTensor on a mesh of ranks 0 and 1, and a view of half a tensor with a cast."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, zeros

    group = join()
    mesh = DeviceMesh("cpu", [0, 1])
    target = zeros((7, 5), dtype=torch.float64, device_mesh=mesh, placements=[Shard(0)])
    load(Path(folder), into={"t": target}, cast=True)
    return [group.rank, target.to_local().tolist()]


def test_ranks_outside_of_the_mesh_and_casts(pool_of_4: Any, tmp_path: Path) -> None:
    tensor = full("uneven")
    save(tmp_path, {"t": tensor})
    found = dict(pool_of_4.run(load_onto_some, str(tmp_path)))
    assert found[0] + found[1] == tensor.tolist()
    assert not any(found[2]), found
    assert not any(found[3]), found
