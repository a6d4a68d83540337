"""The table of operators is the only one, and every name in it is an operator."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from roundoff.ops import base, facts, operators_that
from roundoff.ops.table import MULTIPLYING_KINDS, Trait, operators_of

SOURCE = Path(__file__).parents[2] / "src" / "roundoff"
REASON = (
    "What operators are stands in src/roundoff/ops/table.py alone, so that two rooms never "
    "disagree: add a trait there and ask operators_that(...) or facts(...)."
)
#: Words of every program, and attributes of tensors, that happen to be operators.
COMMON_WORDS = frozenset(
    """all any bias clip copy data dot fill float double half index input max mean min norm
    output real relu round scale size std sum to values var zero abs cat
    dtype device layout shape stride numel memory_format""".split()
)
#: Names that a site or another tool's dump has, and torch does not register.
NOT_REGISTERED = frozenset(
    """gradient T H mH mT radd rmul rdiv rsub rpow rmatmul getitem setitem deepcopy identity
    isub nested_tensor tensor as_tensor from_numpy asarray new_tensor cross_entropy
    lift_fresh_copy logsigmoid zero_tensor _cudnn_ctc_loss dropout1d dropout2d dropout3d
    multi_head_attention_forward softsign tanhshrink softmin gumbel_softmax
    local_response_norm cpu cuda double half bfloat16 float type data requires_grad
    shape dim numel tolist miopen_rnn miopen_rnn_backward miopen_batch_norm relu6
    rnn_tanh rnn_relu contains""".split()
)


def operator_names() -> frozenset[str]:
    """Every kernel of aten, and every function and method of torch."""
    kernels = {
        base(name.removeprefix("aten::").partition(".")[0])
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    functions = {
        name
        for owner in (torch, torch.Tensor, torch.nn.functional)
        for name, value in inspect.getmembers(owner, callable)
        if not isinstance(value, type)
    }
    return frozenset(kernels | functions)


def strings_of(node: ast.expr) -> list[str]:
    """The strings of a literal collection, or the words of a text that is split."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        text = node.func.value
        if node.func.attr == "split" and isinstance(text, ast.Constant):
            return str(text.value).split()
    if isinstance(node, ast.Dict):
        if all(isinstance(value, (ast.Name, ast.Attribute)) for value in node.values):
            return []  # which function of a room handles an operator is the room's to say
        items: list[ast.expr | None] = list(node.keys)
    elif isinstance(node, (ast.Set, ast.List, ast.Tuple)):
        items = list(node.elts)
    else:
        return []
    values = [item.value for item in items if isinstance(item, ast.Constant)]
    return [value for value in values if isinstance(value, str)]


def tables_in(path: Path, operators: frozenset[str]) -> Iterator[str]:
    """One line for each literal collection of four or more operators, most of whose strings are."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.expr):
            continue
        strings = strings_of(node)
        named = [s for s in strings if s in operators and s not in COMMON_WORDS]
        if len(named) >= 4 and len(named) >= 0.6 * len(strings):
            yield f"{path.relative_to(SOURCE)}:{node.lineno}: {', '.join(named[:4])}"


def lists_of_kinds_in(path: Path) -> Iterator[str]:
    """One line for each literal collection of the kinds that multiply."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.Set, ast.List, ast.Tuple)):
            continue
        if {"conv", "linear", "matmul", "attention"} <= set(strings_of(node)):
            yield f"{path.relative_to(SOURCE)}:{node.lineno}"


def outside_of_ops() -> list[Path]:
    return [p for p in sorted(SOURCE.rglob("*.py")) if SOURCE / "ops" not in p.parents]


def test_no_list_of_operators_stands_outside_of_ops():
    operators = operator_names()
    tables = [line for path in outside_of_ops() for line in tables_in(path, operators)]
    assert not tables, "\n".join([*tables, REASON])


def test_the_kinds_that_multiply_are_listed_once():
    lists = [line for path in outside_of_ops() for line in lists_of_kinds_in(path)]
    assert not lists, "\n".join([*lists, "Ask for MULTIPLYING_KINDS or MATRIX_KINDS."])


@pytest.mark.parametrize(
    "text",
    [
        "X = frozenset('matmul softmax layer_norm cumsum'.split())",
        "X = ('matmul', 'softmax', 'layer_norm', 'cumsum')",
        "def f(name):\n    return name in {'matmul', 'softmax', 'layer_norm', 'cumsum'}",
        "X = {'matmul': 1, 'softmax': 2, 'layer_norm': 3, 'cumsum': 4}",
    ],
)
def test_a_list_is_seen(text, tmp_path, monkeypatch):
    path = tmp_path / "new.py"
    path.write_text(text)
    operators = operator_names()
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    [line] = tables_in(path, operators)
    assert line.startswith("new.py:")
    assert line.endswith("matmul, softmax, layer_norm, cumsum")


def test_a_choice_of_functions_is_no_list_of_operators(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    path = tmp_path / "new.py"
    path.write_text("X = {'matmul': f, 'softmax': g, 'layer_norm': h, 'cumsum': f}")
    assert not list(tables_in(path, operator_names()))


def test_an_unknown_trait_is_an_error():
    with pytest.raises(KeyError, match="fly"):
        operators_that("fly")


def test_settings_and_attributes_are_no_operators(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    path = tmp_path / "new.py"
    path.write_text("X = ('dtype', 'device', 'layout', 'shape', 'min', 'max', 'mean')")
    assert not list(tables_in(path, operator_names()))
    path.write_text("X = ('shape', 'stride', 'numel', 'memory_format', 'reshape')")
    assert not list(tables_in(path, operator_names()))


@pytest.mark.parametrize("trait", get_args(Trait))
def test_every_name_of_a_trait_is_an_operator(trait):
    names = operators_that(trait)
    assert names
    unknown = names - operator_names() - NOT_REGISTERED
    assert {name for name in unknown if not hasattr(torch.ops.prims, name)} == set()


@pytest.mark.parametrize("name", ["mm", "conv2d", "lstm", "convolution_backward"])
def test_what_multiplies(name):
    assert facts(name).multiplies
    assert name in operators_that("multiply")


@pytest.mark.parametrize("name", ["softmax", "add", "embedding", "a_new_operator"])
def test_what_does_not_multiply(name):
    assert not facts(name).multiplies


def test_every_operator_of_a_multiplying_kind_multiplies():
    assert operators_of(MULTIPLYING_KINDS) <= operators_that("multiply")


def test_the_ways_of_moving_values_do_not_overlap():
    ways: tuple[Trait, ...] = (
        "keep values",
        "cast",
        "copy in",
        "reshape",
        "permute axes",
        "expand",
        "repeat",
        "reorder",
        "cut out",
        "join",
        "fill",
        "write into",
        "store or add",
        "sort",
        "drop out",
        "repack",
    )
    names = [name for way in ways for name in operators_that(way)]
    assert len(names) == len(set(names))
    assert set(names) == operators_that("move values")


def test_what_rounds_nothing_is_no_cast_and_no_sum():
    exact = operators_that("round nothing")
    assert not exact & operators_that("cast")
    assert not exact & operators_that("multiply")
    assert not exact & (operators_that("sum") - {"max", "min"})


def test_an_unknown_operator_is_elementwise():
    unknown = facts("a_new_operator")
    assert unknown.kind == "elementwise"
    assert unknown.operands == ()
