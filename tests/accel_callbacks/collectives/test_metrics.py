"""Evaluation on two processes: every sample is counted exactly once."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from accel_callbacks import Accelerator, DataLoaderConfiguration
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed

Pair = namedtuple("Pair", "a b")


def accelerator(**options) -> Accelerator:
    return Accelerator(
        cpu=True,
        timeout=BOUND,
        dataloader_config=DataLoaderConfiguration(**options),
    )


class Varying(BatchSampler):
    """Batches of 1, 2, 3, 1, 2, 3, ... samples, in order."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        start = size = 0
        while start < self.count:
            size = size % 3 + 1
            yield list(range(start, min(start + size, self.count)))
            start += size

    def __len__(self):
        return sum(1 for _ in self)


LOADERS = {
    "batches": lambda count: DataLoader(range(count), 4),
    "varying": lambda count: DataLoader(range(count), batch_sampler=Varying(count)),
    "workers": lambda count: DataLoader(range(count), 4, num_workers=2),
}


def gathered(kind: str, count: int, options: dict, skip: int) -> dict:
    """What an evaluation gathers, in every form; the same on all processes."""
    accel = accelerator(**options)
    loader = accel.prepare(LOADERS[kind](count))
    seen: dict = {"tensor": [], "pair": [], "dict": [], "text": [], "mixed": [], "tuple": []}
    means, after = 0, None
    for batch in accel.skip_first_batches(loader, skip):
        numbers = batch.tolist()
        seen["tensor"] += accel.gather_for_metrics(batch).tolist()
        pair = accel.gather_for_metrics([Pair(batch, (batch * 2)[:, None])])[0]
        assert isinstance(pair, Pair)
        assert pair.b[:, 0].tolist() == (pair.a * 2).tolist()
        seen["pair"] += pair.a.tolist()
        seen["dict"] += accel.gather_for_metrics({"x": (batch,)})["x"][0].tolist()
        seen["text"] += accel.gather_for_metrics([f"n{n}" for n in numbers])
        seen["tuple"] += accel.gather_for_metrics(tuple(map(str, numbers)), use_gather_object=True)
        mixed = accel.gather_for_metrics({"x": batch, "text": [f"n{n}" for n in numbers], "k": 3})
        assert mixed["text"] == [f"n{n}" for n in mixed["x"].tolist()]
        assert mixed["k"].tolist() == [3, 3]
        seen["mixed"] += mixed["x"].tolist()
        means += len(accel.gather_for_metrics(batch.float().mean()))
        assert accel.gather_for_metrics({"rank": accel.process_index}) == [{"rank": 0}, {"rank": 1}]
        after = batch
    assert not accel.loop.position.active
    seen["means"] = means
    seen["outside"] = None if after is None else len(accel.gather_for_metrics(after))
    seen["last"] = None if after is None else len(accel.gather(after))
    return seen


OPTIONS = {
    "even": {},
    "uneven": {"even_batches": False},
    "split": {"split_batches": True},
}


@pytest.mark.parametrize(
    ("kind", "options", "skip"),
    [
        # Each pair of the three.
        (kind, options, (i + j) % 2)
        for i, kind in enumerate(LOADERS)
        for j, options in enumerate(OPTIONS)
    ],
)
def test_every_sample_is_gathered_exactly_once(pool, kind, options, skip):
    for count in (2, 5, 7, 12, 13):
        first, second = pool.run(gathered, kind, count, OPTIONS[options], skip)
        assert first == second
        expected = first["tensor"]
        assert expected == list(range(count - len(expected), count))
        assert skip or len(expected) == count
        assert not skip or len(expected) < count
        assert first["pair"] == first["dict"] == first["mixed"] == expected
        assert first["text"] == [f"n{n}" for n in expected]
        assert first["tuple"] == [str(n) for n in expected]
        assert first["outside"] == first["last"]  # there is no batch to count by


def ready_batches(count: int) -> list:
    accel = accelerator()
    data = [torch.tensor([n, n]) for n in range(count)]
    loader = accel.prepare(DataLoader(data, batch_size=None))
    seen, means, text = [], [], []
    for batch in loader:
        seen += accel.gather_for_metrics(batch).tolist()
        means += accel.gather_for_metrics(batch.float().mean()).tolist()
        text += accel.gather_for_metrics([str(n) for n in batch.tolist()])
    return [seen, means, text]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ready_batches_that_are_repeated_are_left_out_as_a_whole(pool, count):
    twice = [n for n in range(count) for _ in range(2)]
    expected = [twice, list(range(count)), [str(n) for n in twice]]
    assert pool.run(ready_batches, count) == [expected] * 2


def nested(even: bool) -> list:
    """An evaluation inside of a training loop; both loaders have a tail."""
    accel = accelerator(even_batches=even)
    model = accel.prepare(torch.nn.Linear(1, 1))
    train, val = accel.prepare(DataLoader(range(9), 2), DataLoader(range(5), 2))
    trained, evaluated = [], []
    for batch in train:
        with accel.evaluate(model):
            evaluated.append([n for one in val for n in accel.gather_for_metrics(one).tolist()])
        trained += accel.gather_for_metrics(batch).tolist()
    return [trained, evaluated]


@pytest.mark.parametrize("even", [False, True])
def test_an_evaluation_inside_of_a_training_loop_counts_by_its_own_loader(pool, even):
    (first, evaluated), second = pool.run(nested, even)
    assert [first, evaluated] == second
    assert first == list(range(9))
    assert evaluated == [list(range(5))] * (3 if even else 2)


def two_for_each_sample() -> list:
    """What is gathered in the inner loop happens to have the size of the outer loop's batch."""
    accel = accelerator()
    model = accel.prepare(torch.nn.Linear(1, 1))
    train, val = accel.prepare(DataLoader(range(3), 2), DataLoader(range(2), 1))
    for _ in train:
        with accel.evaluate(model):
            for batch in val:
                return accel.gather_for_metrics(batch.repeat(2)).tolist()
    return []


def test_an_evaluation_never_counts_by_the_loader_of_the_training_loop(pool):
    assert pool.run(two_for_each_sample) == [[0, 0, 1, 1]] * 2


def breaks() -> list:
    accel = accelerator()
    loader = accel.prepare(DataLoader(range(3), 2))
    for batch in loader:  # two processes: a single batch, with one repetition
        inside = accel.gather_for_metrics(batch).tolist()
        break
    outside = accel.gather_for_metrics(batch).tolist()
    again = [n for one in loader for n in accel.gather_for_metrics(one).tolist()]
    return [inside, outside, again]


def test_after_a_break_nothing_is_cut_and_the_next_loop_counts_anew(pool):
    assert pool.run(breaks) == [[[0, 1, 2], [0, 1, 2, 0], [0, 1, 2]]] * 2


def side_by_side(sizes: tuple, evaluation: bool) -> list:
    accel = accelerator()
    model = accel.prepare(torch.nn.Linear(1, 1))
    loaders = accel.prepare(*(DataLoader(range(7), size) for size in sizes))
    seen: list = [[], []]
    model.train(not evaluation)
    for pair in zip(*loaders, strict=False):
        for index, batch in enumerate(pair):
            seen[index] += accel.gather_for_metrics(batch).tolist()
    return seen


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((2, 2), (7, 7)), ((4, 2), (7, 4)), ((2, 4), (4, 7))],
)
def test_loaders_side_by_side_each_count_their_own_batch(pool, sizes, expected, evaluation):
    result = [list(range(count)) for count in expected]
    assert pool.run(side_by_side, sizes, evaluation) == [result] * 2


def unequal() -> list:
    """Batches of another size on each process, as a filter leaves them."""
    accel = accelerator()
    loader = accel.prepare(DataLoader(range(8), 2))
    seen, objects = [], []
    for batch in loader:
        kept = batch[: 1 + accel.process_index]
        seen += accel.gather_for_metrics({"x": kept})["x"].tolist()
        objects += accel.gather_for_metrics([str(n) for n in kept.tolist()])
    return [seen, objects]


def test_what_has_another_size_on_each_process_is_gathered_whole(pool):
    expected = [0, 2, 3, 4, 6, 7]
    assert pool.run(unequal) == [[expected, [str(n) for n in expected]]] * 2


def per_class() -> list:
    """A tensor with an entry for each class, in a batch that is filled up."""
    accel = accelerator()
    loader = accel.prepare(DataLoader(range(3), 2))
    return [accel.gather_for_metrics(torch.arange(5)).tolist() for _ in loader]


def test_a_tensor_that_has_no_entry_for_each_sample_is_only_gathered(pool):
    assert pool.run(per_class) == [[[0, 1, 2, 3, 4] * 2]] * 2


def means(count: int, batch_size: int) -> list:
    accel = accelerator(even_batches=False)
    loader = accel.prepare(DataLoader(torch.arange(float(count)), batch_size))
    total, seen, plain = 0.0, 0, []
    for batch in loader:
        mean = accel.reduce(batch.mean(), "mean", weight=len(batch))
        plain.append(accel.reduce(batch.mean(), "mean").item())
        total += mean.item() * loader.real
        seen += loader.real
    return [total / seen, sum(plain) / len(plain)]


@pytest.mark.parametrize("count", [5, 7, 9, 11])
def test_means_of_unequal_shares_give_the_true_mean_with_their_weights(pool, count):
    first, second = pool.run(means, count, 2)
    assert first == second
    assert first[0] == pytest.approx((count - 1) / 2)
    assert first[1] != pytest.approx((count - 1) / 2)


def counted_apart(kept: list) -> list:
    """A source that repeats in the middle, as a stream that is sharded unevenly does."""
    accel = accelerator()
    loader = accel.prepare(DataLoader(range(8), 4))
    for batch in loader:
        loader.kept, loader.real = kept, sum(kept)
        return [
            accel.gather_for_metrics(batch).tolist(),
            accel.gather_for_metrics([str(n) for n in batch.tolist()]),
            len(accel.gather_for_metrics(batch.float().mean())),
        ]
    return []


@pytest.mark.parametrize(
    ("kept", "expected", "processes"),
    [([1, 4], [0, 4, 5, 6, 7], 2), ([4, 0], [0, 1, 2, 3], 1), ([0, 2], [4, 5], 1)],
)
def test_repetitions_that_are_not_at_the_end_are_dropped_where_they_are(
    pool, kept, expected, processes
):
    result = [expected, [str(n) for n in expected], processes]
    assert pool.run(counted_apart, kept) == [result] * 2


def detections(numbers: list[int]) -> list[dict]:
    """Boxes and labels of each image, as many as its number and one."""
    return [
        {"boxes": torch.full((n + 1, 4), float(n)), "labels": torch.full((n + 1,), n), "id": n}
        for n in numbers
    ]


@dataclass
class Detected:
    boxes: torch.Tensor


def samples(count: int, size: int, even: bool) -> dict:
    accel = accelerator(even_batches=even)
    loader = accel.prepare(DataLoader(range(count), size))
    seen: dict = {name: [] for name in ("dicts", "pair", "classes", "tokens", "arrays", "scores")}
    for batch in loader:
        numbers = batch.tolist()
        found, boxes = detections(numbers), [np.full(n + 1, n) for n in numbers]
        seen["dicts"] += [one["id"] for one in accel.gather_for_metrics(found)]
        pairs = accel.gather_for_metrics((found, tuple(found)))
        for prediction, target in zip(*pairs, strict=True):
            assert torch.equal(prediction["boxes"], target["boxes"])
            assert len(prediction["boxes"]) == prediction["id"] + 1
            seen["pair"].append(target["labels"][0].item())
        mixed = accel.gather_for_metrics(
            {
                "x": batch,
                "d": [Detected(one["boxes"]) for one in found],
                "t": tuple(map(str, numbers)),
            }
        )
        assert mixed["t"] == [str(n) for n in mixed["x"].tolist()]
        seen["classes"] += [int(one.boxes[0, 0]) for one in mixed["d"]]
        tokens = accel.gather_for_metrics([torch.full((2 * size + n,), n) for n in numbers])
        assert [len(one) for one in tokens] == [2 * size + int(one[0]) for one in tokens]
        seen["tokens"] += [int(one[0]) for one in tokens]
        seen["arrays"] += [int(one[0]) for one in accel.gather_for_metrics(boxes)]
        seen["scores"] += [n.item() for n in accel.gather_for_metrics(list(batch))]
        whole, again = accel.gather_for_metrics([batch, batch * 2])
        assert torch.equal(again, whole * 2)
        assert whole.tolist() == mixed["x"].tolist()
    return seen


SIZES = [(5, 2, True), (7, 2, False), (3, 1, True), (12, 4, True), (1, 1, True)]


@pytest.mark.parametrize(("count", "size", "even"), SIZES)
def test_a_list_with_an_entry_for_each_sample_is_the_list_of_all_samples(pool, count, size, even):
    first, second = pool.run(samples, count, size, even)
    assert first == second
    for name, numbers in first.items():
        assert numbers == list(range(count)), name


def filtered() -> list:
    """Lists of other lengths than the batch: some processes have nothing to say."""
    accel = accelerator()
    seen = []
    for batch in accel.prepare(DataLoader(range(6), 2)):
        found = detections([n for n in batch.tolist() if n % 4 == 1])
        seen += [one["id"] for one in accel.gather_for_metrics(found)]
        pair = accel.gather_for_metrics({"x": batch, "found": found})
        assert [one["id"] for one in pair["found"]] == [n for n in pair["x"].tolist() if n % 4 == 1]
    alone = accel.gather_for_metrics(detections([accel.process_index]))
    return [seen, [one["id"] for one in alone]]


def test_dicts_of_one_form_are_samples_however_many(pool):
    assert pool.run(filtered) == [[[1, 5], [0, 1]]] * 2


def arrays() -> list:
    accel = accelerator()
    seen: list = [[], [], []]
    for batch in accel.prepare(DataLoader(range(5), 2)):
        array = batch.numpy()
        whole = accel.gather_for_metrics(array)
        assert isinstance(whole, np.ndarray)
        guesses, labels = accel.gather_for_metrics((array * 2, array))
        seen[0] += whole.tolist()
        seen[1] += labels.tolist()
        seen[2] += accel.gather_for_metrics({"x": guesses[: len(array)], "k": 1})["k"].tolist()
        assert (guesses == labels * 2).all()
    return seen


def test_arrays_are_gathered_as_tensors_are(pool):
    assert pool.run(arrays) == [[list(range(5))] * 2 + [[1] * 4]] * 2


def each_rank_its_own() -> list:
    accel = accelerator()
    me = accel.process_index
    return [
        accel.gather_for_metrics({f"image {me}": ["a"] * me}),
        accel.gather_for_metrics({"loss": 1.0 + me}),
        accel.gather_for_metrics("text" if me else None),
    ]


def test_objects_may_differ_between_processes(pool):
    expected = [
        [{"image 0": []}, {"image 1": ["a"]}],
        [{"loss": 1.0}, {"loss": 2.0}],
        [None, "text"],
    ]
    assert pool.run(each_rank_its_own) == [expected] * 2


def names_beside_tensors(kind: str) -> None:
    accel = accelerator()
    name = f"r{accel.process_index}"
    data = {"dict": {"x": torch.ones(2), "name": name}, "list": [torch.ones(2), name]}[kind]
    accel.gather_for_metrics(data)


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_an_object_beside_tensors_is_an_error_on_all_processes(pool, kind):
    for name, text in pool.outcomes(names_beside_tensors, kind):
        assert name == "TypeError"
        assert "of type str" in text
        assert "use_gather_object=True" in text
    assert pool.run(per_class) == [[[0, 1, 2, 3, 4] * 2]] * 2  # the group goes on
