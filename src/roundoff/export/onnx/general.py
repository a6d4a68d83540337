"""Branches on sizes that a model computes from values, answered for the general case.

How many rows a mask selects is not known while a model is traced. Code such as
``if rows.numel() == 0: continue`` asks for it, to save work or to leave out what
would fail. The general case has two rows or more: its branch is traced, and whether
it is right for fewer is for the caller to try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)

from roundoff.export.onnx.passes import runnable_batches
from roundoff.export.onnx.readings import user_line
from roundoff.export.onnx.traced import Traced
from roundoff.workload import Workload

_environment: Any = ShapeEnv


@contextmanager
def general_case(numbers_differ: Callable[[], bool]) -> Iterator[list[str]]:
    """Answer branches on computed sizes inside the block as if none were 0 or 1.

    Yields the lines of the user's code that asked, in order. While ``numbers_differ()``,
    two numbers that are read from values are taken to differ, too.
    """
    lines: list[str] = []
    evaluate = _environment.evaluate_sym_node

    def answered(environment: Any, node: Any, *args: Any, **options: Any) -> Any:
        try:
            return evaluate(environment, node, *args, **options)
        except GuardOnDataDependentSymNode:
            answer = _of_sizes(environment, node, evaluate)
            if answer is None and numbers_differ():
                answer = _of_numbers(node.expr)
            if answer is None:
                raise
            lines.append(user_line())
            return answer

    _environment.evaluate_sym_node = answered
    try:
        yield lines
    finally:
        _environment.evaluate_sym_node = evaluate


def _of_sizes(environment: Any, node: Any, evaluate: Any) -> Any:
    """Return what a condition is for sizes of two and more; None if it may be either."""
    if not free_unbacked_symbols(node.expr) <= environment.size_like:
        return None
    try:
        return evaluate(environment, node, size_oblivious=True)
    except GuardOnDataDependentSymNode:
        return None


def _of_numbers(condition: Any) -> Any:
    """Return what a comparison is for numbers that differ; None for other conditions."""
    relation = getattr(condition, "rel_op", "")
    return {"==": False, "!=": True}.get(relation)


def remarks(lines: Sequence[str]) -> list[str]:
    """Return what to say of the lines whose branch is that of the general case."""
    return [
        f"{line} branches on a size that the model computes: the file takes the branch for two rows and more"
        for line in dict.fromkeys(lines)
        if line
    ]


def differing_batches(workload: Workload, traced: Traced, program: Any) -> list[Any]:
    """Return the batches on which a traced program is not what the model computes.

    Args:
        workload: its batches, and those held out.
        traced: what was traced.
        program: a ``torch.export.ExportedProgram`` of it.
    """
    module = program.module()
    return [
        batch
        for batch, tensors in runnable_batches(workload, traced)
        if not _computes(module, tensors, traced(*tensors))
    ]


def _computes(module: Any, tensors: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return True if a program runs and returns what is wanted."""
    try:
        outputs = module(*tensors)
    except (RuntimeError, AssertionError):
        return False
    return all(
        output.shape == other.shape and _alike(output, other)
        for output, other in zip(outputs, wanted, strict=True)
    )


def _alike(output: Tensor, wanted: Tensor) -> bool:
    """Return True for tensors that the same operators made, in any order of sums.

    Another branch differs by what it computes: by far more than 0.1% of the largest.
    """
    if not output.is_floating_point():
        return torch.equal(output, wanted)
    largest = wanted.nan_to_num().abs().max().item() if wanted.numel() else 0.0
    return torch.allclose(
        output, wanted, rtol=1e-3, atol=1e-3 * largest, equal_nan=True
    )
