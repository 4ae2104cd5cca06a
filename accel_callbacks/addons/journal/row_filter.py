"""Choose rows of a journal by an expression such as ``loss > 8 and epoch == 0``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from accel_callbacks.addons.journal.format import JournalError
from accel_callbacks.errors import nearest

__all__ = ["chosen_rows"]

_COMPARISONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def chosen_rows(rows: np.ndarray[Any, Any], expression: str) -> np.ndarray[Any, Any]:
    """Return the rows for which an expression holds.

    Args:
        rows: of a journal.
        expression: fields and numbers with ``< <= > >= == !=``, ``+ - * /``, ``and``, ``or`` and
            ``not``; nothing else is evaluated. ``nan`` is a number, which only ``!=`` finds: a loss
            that is not a number is ``loss != loss``.

    Raises:
        JournalError: the expression has something else, or an unknown field.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise JournalError(
            f"{expression[:60]!r} is no condition: write one such as 'loss > 8 and epoch == 0'."
        ) from None
    with np.errstate(all="ignore"):
        holds = _value(tree, rows)
    if np.asarray(holds).dtype != np.bool_:
        raise JournalError(f"{expression!r} is a number: compare it, as in 'loss > 8'.")
    chosen: np.ndarray[Any, Any] = rows[np.broadcast_to(holds, rows.shape)]
    return chosen


def _value(node: ast.AST, rows: np.ndarray[Any, Any]) -> Any:
    def inner(part: ast.AST) -> Any:
        return _value(part, rows)

    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return np.float64(node.value)
    if isinstance(node, ast.Name):
        return _field(node.id, rows)
    if isinstance(node, ast.BoolOp):
        join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return join.reduce([np.broadcast_to(inner(part), rows.shape) for part in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        operand = inner(node.operand)
        return np.logical_not(operand) if isinstance(node.op, ast.Not) else -operand
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](inner(node.left), inner(node.right))
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops):
        values = [inner(part) for part in (node.left, *node.comparators)]
        pairs = zip(node.ops, values[:-1], values[1:], strict=True)
        compared = [_COMPARISONS[type(op)](left, right) for op, left, right in pairs]
        return np.logical_and.reduce([np.broadcast_to(holds, rows.shape) for holds in compared])
    raise JournalError(
        f"a condition has no {type(node).__name__}: use fields, numbers, comparisons, + - * /, "
        "and, or, not."
    )


def _field(name: str, rows: np.ndarray[Any, Any]) -> Any:
    names = rows.dtype.names or ()
    if name not in names:
        listed = ", ".join(names)
        raise JournalError(f"a row has no {name!r}.{nearest(name, names)} It has {listed}.")
    values = rows[name]
    return values if values.dtype == np.bool_ else values.astype(np.float64)
