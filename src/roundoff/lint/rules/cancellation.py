"""Differences of large numbers that are nearly equal."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.rule import Hit, Rule
from roundoff.lint.script import Script
from roundoff.lint.tensors import (
    is_number,
    operation,
    same_text,
    value_of,
    without_views,
)


def _variance_by_difference(script: Script) -> Iterator[Hit]:
    for node in script.nodes(ast.BinOp):
        if not isinstance(node.op, ast.Sub):
            continue
        mean = _squared(script, node.right)
        if mean is None:
            continue
        first = value_of(script, node.left)
        second = value_of(script, mean)
        if _are_moments(script, first, second) or _are_sums(first, second):
            yield Hit(node)


def _squared(script: Script, node: ast.expr) -> ast.expr | None:
    """Return what an expression is the square of; None for what is no square."""
    node = value_of(script, node) or node
    if isinstance(node, ast.BinOp):
        return _square_written(node)
    each = operation(script, node)
    if each is None:
        return None
    is_power = each.name == "pow" and len(each.operands) > 1
    if is_power and is_number(each.operands[1], 2.0):
        return each.first
    return each.first if each.name == "square" else None


def _square_written(node: ast.BinOp) -> ast.expr | None:
    """Return ``x`` of ``x ** 2`` and ``x * x``."""
    if isinstance(node.op, ast.Pow) and is_number(node.right, 2.0):
        return node.left
    is_product = isinstance(node.op, ast.Mult) and same_text(node.left, node.right)
    return node.left if is_product else None


def _are_moments(
    script: Script, first: ast.expr | None, second: ast.expr | None
) -> bool:
    """Return True for the mean of x squared, and the mean of x."""
    squares = operation(script, without_views(script, first))
    mean = operation(script, without_views(script, second))
    if squares is None or mean is None or squares.name != "mean" or mean.name != "mean":
        return False
    if squares.first is None or mean.first is None:
        return False
    tensor = _squared(script, squares.first)
    return tensor is not None and same_text(tensor, mean.first)


def _are_sums(first: ast.expr | None, second: ast.expr | None) -> bool:
    """Return True for two sums over the same number of samples: ``s2 / n`` and ``s / n``."""
    if not isinstance(first, ast.BinOp) or not isinstance(second, ast.BinOp):
        return False
    if not isinstance(first.op, ast.Div) or not isinstance(second.op, ast.Div):
        return False
    is_same_number = same_text(first.right, second.right)
    is_name = isinstance(first.right, ast.Name | ast.Attribute | ast.Call)
    return is_same_number and is_name and not same_text(first.left, second.left)


_HEAD = "import torch\n\n\ndef variance(x):\n"

RULES = (
    Rule(
        code="RO413",
        name="variance-by-difference",
        message="the mean of the squares less the square of the mean cancels: write x.var(unbiased=False), or the mean "
        "of (x - mean)**2",
        why="For values around 1000 that vary by 0.1 both means are near 1e6, where float32 has steps of 0.06: the "
        "variance of 0.01 comes out as 0 or 0.06, or negative, and its root is NaN.",
        wrong=_HEAD + "    return (x**2).mean(0) - x.mean(0) ** 2\n",
        right=_HEAD + "    return x.var(0, unbiased=False)\n",
        check=_variance_by_difference,
    ),
)
