"""Walking trees for the tensors in them: views of saved ones, and the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from checkpoint_io.reading.tensor_view import TensorView

Path = tuple[Any, ...]


def views_in(tree: Any) -> Iterator[TensorView]:
    """Yield the views in a tree, in its order."""
    if isinstance(tree, TensorView):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from views_in(item)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for item in tree:
            yield from views_in(item)


def replace_views(tree: Any, value: Callable[[TensorView], Any]) -> Any:
    """Build the same tree with a value in place of each view."""
    if isinstance(tree, TensorView):
        return value(tree)
    if isinstance(tree, dict):
        return {key: replace_views(item, value) for key, item in tree.items()}
    if isinstance(tree, (list, tuple, set, frozenset)):
        return type(tree)(replace_views(item, value) for item in tree)
    return tree


def as_leaf(view: TensorView, tensor: torch.Tensor) -> Any:
    """Return a tensor as what it was saved from."""
    return tensor.numpy() if view.is_array else tensor


def beside(tree: Any, saved: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Yield each leaf of the caller's tree with its path and what was saved there (or None)."""
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from beside(item, _child(saved, key), (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from beside(item, _child(saved, index), (*path, index))
    else:
        yield path, tree, saved


def _child(saved: Any, key: Any) -> Any:
    """Return what a saved dict or sequence holds under a key, None for nothing."""
    if isinstance(saved, dict):
        return saved.get(key)
    if isinstance(saved, (list, tuple)) and type(key) is int and key < len(saved):
        return saved[key]
    return None
