"""Loading a part: by pattern, under other names, and saying what did not match."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import StateMismatchError, TensorView, load, save
from checkpoint_io.loader import selection
from checkpoint_io.loader.selection import Matched, match_names, nearest


@pytest.fixture
def place(tmp_path: Path) -> Path:
    model = {"enc.weight": torch.ones(2), "enc.bias": torch.ones(2), "head.weight": torch.ones(2)}
    optimizer = {"state": {0: {"m": torch.ones(2)}}, "lr": 0.1}
    save(
        tmp_path,
        {"models": {"0": model}, "optimizers": [optimizer], "step": 5},
        local_state={"rng": torch.ones(2)},
    )
    return tmp_path


def read_of(tree: Any) -> set[str]:
    """The keys below which something was read."""
    if isinstance(tree, dict):
        return {key for key, item in tree.items() if read_of(item)}
    if isinstance(tree, list):
        return {str(n) for n, item in enumerate(tree) if read_of(item)}
    return {""} if isinstance(tree, torch.Tensor) else set()


@pytest.mark.parametrize(
    ("only", "found"),
    [
        ("models/0/*", {"enc.weight", "enc.bias", "head.weight"}),
        ("*.bias", {"enc.bias"}),
        (["*enc*", "*/head.weight"], {"enc.weight", "enc.bias", "head.weight"}),
        (lambda key: key.endswith("head.weight"), {"head.weight"}),
        ("models/0/[eh]*.weight", {"enc.weight", "head.weight"}),
    ],
)
def test_only_the_model(place: Path, only: Any, found: set[str]) -> None:
    checkpoint = load(place, only=only)
    assert read_of(checkpoint.state["models"]["0"]) == found
    assert read_of(checkpoint.state["optimizers"]) == set()
    assert checkpoint.state["step"] == 5
    assert isinstance(checkpoint.local_state["rng"], TensorView)  # type: ignore[index]
    assert isinstance(checkpoint.state["optimizers"][0]["state"][0]["m"], TensorView)


def test_what_was_not_selected_is_not_read(tmp_path: Path) -> None:
    save(tmp_path / "d", {"models": {"w": torch.ones(4)}, "junk": torch.ones(4)}, max_shard_size=16)
    shards = sorted(
        (tmp_path / "d").glob("tensors-*"), key=lambda file: b"junk" in file.read_bytes()
    )
    shards[-1].unlink()
    assert load(tmp_path / "d", only="models/*").state["models"]["w"].all()


def test_a_pattern_that_matches_nothing(place: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"'modles/0/enc\.bias' \(nearest: models/0/enc"):
        load(place, only=["models/*", "modles/0/enc.bias"])
    checkpoint = load(place, only="nothing/*", strict=False)
    assert checkpoint.missing == ("nothing/*",)
    assert read_of(checkpoint.state) == set()


@pytest.mark.parametrize(
    "rename",
    [{"models/0/": "net/", "models/0/head.": "net/classifier."},
     lambda key: key.replace("models/0", "net").replace("head", "classifier")],
    ids=["prefixes", "function"],
)  # fmt: skip
def test_into_other_names(place: Path, rename: Any) -> None:
    names = ("enc.weight", "enc.bias", "classifier.weight")
    mine = {name: torch.zeros(2) for name in names}
    checkpoint = load(place, into={"net": mine}, rename=rename, only="models/*")
    assert all(value.all() for value in mine.values())
    assert checkpoint.state["models"]["0"]["head.weight"] is mine["classifier.weight"]
    extra = {**mine, "more": torch.zeros(2)}
    with pytest.raises(StateMismatchError, match="missing net/more"):
        load(place, into={"net": extra}, rename=rename, only="models/*")


def test_a_pattern_that_matches_nothing_fills_nothing(place: Path) -> None:
    mine = {name: torch.zeros(2) for name in ("enc.weight", "enc.bias", "head.weight")}
    with pytest.raises(StateMismatchError, match=r"'modles/\*'.*nothing was changed"):
        load(place, into={"models": {"0": mine}}, only="modles/*")
    checkpoint = load(place, into={"models": {"0": mine}}, only="modles/*", strict=False)
    assert checkpoint.missing == ("modles/*",)
    assert not any(value.any() for value in mine.values())


def test_rename_needs_into(place: Path) -> None:
    with pytest.raises(ValueError, match="into="):
        load(place, rename={"a": "b"})


def test_only_some_of_the_targets(place: Path) -> None:
    mine = {name: torch.zeros(2) for name in ("enc.weight", "enc.bias", "head.weight")}
    checkpoint = load(place, into={"models": {"0": mine}}, only="*/enc.*")
    assert [bool(value.any()) for value in mine.values()] == [True, True, False]
    assert checkpoint.missing == checkpoint.unexpected == ()
    with pytest.raises(StateMismatchError, match=r"unexpected models/0/enc\.bias"):
        load(place, into={"models": {"0": {"enc.weight": torch.zeros(2)}}}, only="*/enc.*")


# --- matching names ------------------------------------------------------------------------


def test_matching_without_options() -> None:
    found = match_names(["a", "b", "x"], ["b", "a", "y"])
    assert found == Matched([("a", "a"), ("b", "b")], ["x"], ["y"])


def test_the_longest_prefix_wins_and_applies_once() -> None:
    found = match_names(["m.a", "m.q.b"], ["p.a", "p.n.b"], None, {"p.": "m.", "p.n.": "m.q."})
    assert found.pairs == [("m.a", "p.a"), ("m.q.b", "p.n.b")]


def test_a_name_that_was_not_selected_is_not_missing() -> None:
    found = match_names(["a.1", "a.2", "b.1"], ["a.1", "b.1"], only="a.*")
    assert found == Matched([("a.1", "a.1")], ["a.2"], [])
    found = match_names(["n.1", "k.1"], ["a.1", "b.1"], only="a.*", rename={"a": "n", "b": "k"})
    assert found == Matched([("n.1", "a.1")], [], [])


def test_two_names_that_become_one() -> None:
    with pytest.raises(ValueError, match=r"'a\.x' and 'b\.x' into 'x'"):
        match_names([], ["a.x", "b.x"], rename={"a.": "", "b.": ""})


def test_long_lists_are_cut_and_few_names_of_them_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    really = difflib.get_close_matches

    def counted(name: str, names: list[str], **how: Any) -> list[str]:
        compared.append(len(names))
        return really(name, names, **how)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    monkeypatch.setattr(selection, "_COMPARED", 50)
    wanted = [f"layer.{n}.attn.weight" for n in range(20_000)]
    found = match_names(wanted, [f"layers.{n}.attn.weight" for n in range(20_000)])
    assert len(found.missing) == len(found.unexpected) == 20_000
    text = found.describe()
    assert "missing layer.0.attn.weight (nearest: layers.0.attn.weight)" in text
    assert "unexpected layers.0.attn.weight (nearest: layer.0.attn.weight)" in text
    assert "and 19992 more" in text
    assert len(text) < 2000
    assert compared == [50] * 16  # for each name that is shown


def test_nothing_is_near() -> None:
    assert nearest("qqq", ["a", "b"]) is None
    assert nearest("qqq", []) is None
