"""Formulas that lose digits, overflow, or have no finite gradient somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from roundoff.lint.activations import Output, output_of
from roundoff.lint.makers import makers
from roundoff.lint.modes import is_without_gradients
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.script import Script
from roundoff.lint.tensors import (
    Operation,
    is_added,
    is_number,
    number,
    operation,
    operations,
    same_text,
    value_of,
    without_views,
)
from roundoff.ops import operators_that

_NORMS = ("norm", "vector_norm")
_SUMS = ("sum", "mean")
_SQUARES = ("square", "pow", "mse_loss")
_BOUNDS = operators_that("clamp") | {"clamp_", "clamp_min_", "maximum"}
_BOUNDED = ("tanh", "cos", "sin")
_LARGEST = ("max", "amax", "logsumexp", "cummax")
_NO_GRADIENT = re.compile(r"\.(?:grad|data|item|detach)\b")


def _log_of_one_plus(script: Script) -> Iterator[Hit]:
    for log in operations(script, "log"):
        total = log.first
        if not isinstance(total, ast.BinOp) or not isinstance(total.op, ast.Add):
            continue
        rest = _other_than(total, 1.0)
        if rest is not None and number(rest) is None:
            edits = _renamed(script, log, "log", "log1p", script.segment(rest))
            yield Hit(log.call, edits=_softplus(script, log, rest) or edits)


def _softplus(script: Script, log: Operation, rest: ast.expr) -> tuple[Edit, ...]:
    """Return the edit of ``log(1 + exp(x))``, whose exp overflows in log1p too."""
    exp = operation(script, rest)
    is_exp = exp is not None and exp.name == "exp" and exp.first is not None
    if not is_exp or script.imports.get("torch") != "torch" or exp is None:
        return ()
    inside = "" if exp.first is None else script.segment(exp.first)
    start, end = script.span(log.call)
    return (Edit(start, end, f"torch.nn.functional.softplus({inside})"),)


def _other_than(node: ast.BinOp, value: float) -> ast.expr | None:
    """Return the side of an operation that is not this number."""
    if is_number(node.left, value):
        return node.right
    return node.left if is_number(node.right, value) else None


def _renamed(
    script: Script, each: Operation, old: str, new: str, operand: str
) -> tuple[Edit, ...]:
    """Return the edit that calls another operator with one operand; none for a method
    with arguments.
    """
    start, end = script.span(each.call)
    function = each.call.func
    if script.called(each.call) is None:
        return (Edit(start, end, f"({operand}).{new}()"),)
    if len(each.call.args) != 1 or each.call.keywords:
        return ()
    name = script.segment(function)
    if not name.endswith(old) or isinstance(function, ast.Name):
        return ()
    return (Edit(start, end, f"{name.removesuffix(old)}{new}({operand})"),)


def _exp_minus_one(script: Script) -> Iterator[Hit]:
    for node in script.nodes(ast.BinOp):
        if not isinstance(node.op, ast.Sub) or not is_number(node.right, 1.0):
            continue
        exp = operation(script, node.left)
        if exp is None or exp.name != "exp" or exp.first is None:
            continue
        edits = _renamed(script, exp, "exp", "expm1", script.segment(exp.first))
        if edits:
            start, end = script.span(node)
            edits = (Edit(start, end, edits[0].text),)
        yield Hit(node, edits=edits)


def _log_of_sum_of_exp(script: Script) -> Iterator[Hit]:
    for log in operations(script, "log"):
        inside = _unbiased(value_of(script, log.first))
        if _is_sum_of_exp(script, inside) or _is_share_of_exp(script, inside):
            yield Hit(log.call)


def _is_sum_of_exp(script: Script, node: ast.expr | None) -> bool:
    """Return True for a sum or mean of exp(x), also a weighted one."""
    total = operation(script, node)
    if total is None or total.name not in _SUMS:
        return False
    summed = value_of(script, total.first)
    parts = [summed]
    if isinstance(summed, ast.BinOp) and isinstance(summed.op, ast.Mult):
        parts = [summed.left, summed.right]
    return any(_overflows(script, part) for part in parts)


def _overflows(script: Script, node: ast.expr | None) -> bool:
    """Return True for exp(x) without the largest x taken off."""
    exp = operation(script, without_views(script, node))
    return exp is not None and exp.name == "exp" and not _is_shifted(script, exp.first)


def _is_share_of_exp(script: Script, node: ast.expr | None) -> bool:
    """Return True for a quotient of exp(x) and a sum that holds others."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return False
    above = without_views(script, node.left)
    below = value_of(script, node.right)
    if not _overflows(script, node.left) or _is_whole_of(script, above, below):
        return False
    parts = [below]
    if isinstance(below, ast.BinOp) and isinstance(below.op, ast.Add):
        parts = [below.left, below.right]
    return any(_is_sum_of_exp(script, value_of(script, each)) for each in parts)


def _is_whole_of(script: Script, part: ast.expr | None, whole: ast.expr | None) -> bool:
    """Return True for the sum of one exp(x) itself, which is a softmax by hand."""
    total = operation(script, whole)
    summed = None if total is None else without_views(script, total.first)
    return part is not None and summed is not None and same_text(part, summed)


def _unbiased(node: ast.expr | None) -> ast.expr | None:
    """Return a sum without the small number that was added to it."""
    if isinstance(node, ast.BinOp) and is_added(node):
        return node.left if number(node.left) is None else node.right
    return node


def _is_shifted(script: Script, node: ast.expr | None) -> bool:
    """Return True where the largest value was subtracted: exp cannot overflow."""
    value = value_of(script, node)
    if value is None or not isinstance(value, ast.BinOp):
        return False
    if isinstance(value.op, ast.Div | ast.Mult):
        return _is_shifted(script, value.left) or _is_shifted(script, value.right)
    if not isinstance(value.op, ast.Sub):
        return False
    names = {
        each.name
        for part in (value_of(script, value.right), value.right)
        if part is not None
        for each in _inside(script, part)
    }
    return bool(names.intersection(_LARGEST)) or "max" in ast.unparse(value.right)


def _inside(script: Script, node: ast.AST) -> list[Operation]:
    """Return the operators that an expression applies anywhere in it."""
    each = [operation(script, part) for part in ast.walk(node)]
    return [part for part in each if part is not None]


def _log_of_softmax(script: Script) -> Iterator[Hit]:
    for log in operations(script, "log"):
        if output_of(script, log.first) is not Output.SOFTMAX:
            continue
        if _is_clamped(script, log.first):
            continue
        softmax = operation(script, log.first)
        edits: tuple[Edit, ...] = ()
        if softmax is not None and softmax.name == "softmax":
            start, end = script.span(log.call)
            text = script.segment(softmax.call)
            function = script.segment(softmax.call.func)
            if function.endswith("softmax"):
                name = function.removesuffix("softmax") + "log_softmax"
                edits = (Edit(start, end, name + text.removeprefix(function)),)
        yield Hit(log.call, edits=edits)


def _is_clamped(script: Script, node: ast.expr | None) -> bool:
    """Return True where probabilities were kept from 0 before."""
    each = operation(script, without_views(script, node))
    return each is not None and each.name in _BOUNDS


def _log_of_sigmoid(script: Script) -> Iterator[Hit]:
    for log in operations(script, "log"):
        value = value_of(script, log.first)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub):
            is_rest = is_number(value.left, 1.0)
            if is_rest and output_of(script, value.right) is Output.SIGMOID:
                message = "log(1 - sigmoid(x)) is -inf from x = 17 on in float32: write F.logsigmoid(-x)"
                yield Hit(log.call, message)
        elif _is_clamped(script, log.first):
            continue
        elif output_of(script, log.first) is Output.SIGMOID:
            yield Hit(log.call)


def _one_minus_cos(script: Script) -> Iterator[Hit]:
    for node in script.nodes(ast.BinOp):
        if not isinstance(node.op, ast.Sub) or not is_number(node.left, 1.0):
            continue
        cos = operation(script, node.right)
        if cos is None or cos.name != "cos" or cos.first is None:
            continue
        text = ast.unparse(cos.first)
        if not re.search(r"\bpi\b|arange|linspace", text):
            yield Hit(node)


def _divided_by_norm(script: Script) -> Iterator[Hit]:
    for node, left, right in _quotients(script):
        if _is_product_of_norms(script, value_of(script, right)):
            yield Hit(node, _NORM_PRODUCT)
            continue
        norm = operation(script, value_of(script, right))
        if norm is None or norm.name not in _NORMS or norm.first is None:
            continue
        if same_text(left, norm.first):
            start, end = script.span(right)
            text = f"{script.segment(right)}.clamp_min(1e-12)"
            edits = () if isinstance(right, ast.BinOp) else (Edit(start, end, text),)
            yield Hit(node, edits=edits)


_NORM_PRODUCT = (
    "a quotient by a product of norms is NaN for a row of zeros: write "
    "F.cosine_similarity(x, y, dim=...), or clamp the norms from below"
)


def _is_product_of_norms(script: Script, node: ast.expr | None) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    factors = [
        operation(script, without_views(script, side))
        for side in (node.left, node.right)
    ]
    return all(each is not None and each.name in _NORMS for each in factors)


def _quotients(script: Script) -> Iterator[tuple[ast.AST, ast.expr, ast.expr]]:
    """Yield divisions: the node, what is divided, and by what."""
    for node in script.nodes(ast.BinOp):
        if isinstance(node.op, ast.Div):
            yield node, node.left, node.right
    for assign in script.nodes(ast.AugAssign):
        if isinstance(assign.op, ast.Div):
            yield assign, assign.target, assign.value
    for each in operations(script, "div", "div_", "true_divide"):
        if len(each.operands) > 1:
            yield each.call, each.operands[0], each.operands[1]


def _root_at_zero(script: Script) -> Iterator[Hit]:
    if not script.uses("torch.nn") and not script.method_calls("backward"):
        return
    for node, inside in _roots(script):
        if not _is_sum_of_squares(script, value_of(script, inside)):
            continue
        if _NO_GRADIENT.search(ast.unparse(node)):
            continue
        above = script.parent(node)
        if isinstance(above, ast.Attribute) and above.attr in ("item", "detach"):
            continue
        if not is_without_gradients(script, node):
            yield Hit(node)


def _roots(script: Script) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield square roots and what is below them: ``torch.sqrt(x)``, ``x ** 0.5``."""
    for root in operations(script, "sqrt"):
        yield root.call, root.first
    for power in operations(script, "pow"):
        if len(power.operands) > 1 and is_number(power.operands[1], 0.5):
            yield power.call, power.first
    for node in script.nodes(ast.BinOp):
        if isinstance(node.op, ast.Pow) and is_number(node.right, 0.5):
            yield node, node.left


def _is_sum_of_squares(script: Script, node: ast.expr | None) -> bool:
    total = operation(script, node)
    if total is None:
        return isinstance(node, ast.Call) and _is_mse(script, node)
    if total.name == "mse_loss" or _is_mse(script, total.call):
        return True
    if total.name not in _SUMS:
        return False
    return _is_square(script, value_of(script, total.first))


def _is_mse(script: Script, call: ast.Call) -> bool:
    """Return True for a call of an ``nn.MSELoss()`` that the script makes."""
    if script.called(call) is not None:
        return False
    several = makers(script, call.func)
    return bool(several) and all(
        script.called(maker) == "torch.nn.MSELoss" for maker in several
    )


def _is_square(script: Script, node: ast.expr | None) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return is_number(node.right, 2.0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return same_text(node.left, node.right)
    each = operation(script, node)
    if each is None or each.name not in _SQUARES:
        return False
    if each.name != "pow":
        return True
    return len(each.operands) > 1 and is_number(each.operands[1], 2.0)


def _arc_at_edge(script: Script) -> Iterator[Hit]:
    for arc in operations(script, "acos", "arccos", "asin", "arcsin", "acosh"):
        argument = value_of(script, arc.first)
        if argument is None or number(argument) is not None:
            continue
        if arc.name == "acosh" or is_without_gradients(script, arc.call):
            continue
        if not _is_bounded(script, argument):
            yield Hit(arc.call)


def _is_bounded(script: Script, node: ast.expr) -> bool:
    """Return True where something keeps the values inside: clamp, tanh, a factor."""
    names = {each.name for each in _inside(script, node)}
    if names.intersection({*_BOUNDS, *_BOUNDED, *operators_that("draw")}):
        return True
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    sides = (node.left, node.right)
    return any(
        value is not None and 0.9 <= value < 1 for value in map(number, sides)
    ) or any("eps" in ast.unparse(side) for side in sides)


def _unsafe_branch(script: Script) -> Iterator[Hit]:
    for where in operations(script, "where"):
        if len(where.operands) < 3 or is_without_gradients(script, where.call):
            continue
        tested = _parts(where.operands[0])
        for branch in where.operands[1:3]:
            if any(ast.dump(each) in tested for each in _risky(script, branch)):
                yield Hit(where.call)
                break


def _parts(node: ast.expr) -> set[str]:
    """Return the tensors that a condition compares."""
    return {
        ast.dump(each)
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute | ast.Subscript)
    }


def _risky(script: Script, branch: ast.expr) -> Iterator[ast.expr]:
    """Yield what a branch takes the logarithm or the root of, or divides by."""
    for each in _inside(script, branch):
        is_risky = each.name in _EDGED
        if is_risky and isinstance(each.first, ast.Name | ast.Attribute):
            yield each.first
    for node in ast.walk(branch):
        is_quotient = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        divisor = getattr(node, "right", None)
        if is_quotient and isinstance(divisor, ast.Name | ast.Attribute):
            yield divisor


_EDGED = operators_that("take logarithms") | {"sqrt", "rsqrt", "reciprocal"}


def _divided_by_std(script: Script) -> Iterator[Hit]:
    for node, left, right in _quotients(script):
        std = operation(script, value_of(script, right))
        if std is not None and std.name == "sqrt":
            std = operation(script, value_of(script, std.first))
        if std is None or std.name not in ("std", "var") or std.first is None:
            continue
        if not _is_centred(script, left, std.first):
            continue
        start, end = script.span(right)
        text = f"({script.segment(right)} + 1e-8)"
        yield Hit(node, edits=(Edit(start, end, text),))


def _is_centred(script: Script, node: ast.expr, tensor: ast.expr) -> bool:
    """Return True for ``x - x.mean()``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return False
    mean = operation(script, value_of(script, node.right))
    is_mean = mean is not None and mean.name == "mean"
    return is_mean and same_text(node.left, tensor)


def _softmax_by_hand(script: Script) -> Iterator[Hit]:
    for node, left, right in _quotients(script):
        total = operation(script, value_of(script, right))
        if total is None or total.name != "sum" or total.first is None:
            continue
        exp = operation(script, without_views(script, left))
        if exp is None or exp.name != "exp" or _is_shifted(script, exp.first):
            continue
        summed = operation(script, without_views(script, total.first))
        if summed is not None and ast.dump(summed.call) == ast.dump(exp.call):
            yield Hit(node)


def _example(line: str, before: str = "") -> str:
    """Return a script around one formula."""
    return f"import torch\nimport torch.nn.functional as F\n\n\ndef formula(x, y):\n{before}    return {line}\n"


RULES = (
    Rule(
        code="RO401",
        name="log-of-one-plus",
        message="log(1 + x) loses the digits of a small x: write torch.log1p(x)",
        why="1 + x is rounded before the logarithm. In float32 every x below 6e-8 gives 0, in bfloat16 every "
        "x below 0.004.",
        wrong=_example("torch.log(1 + x)"),
        right=_example("torch.log1p(x)"),
        check=_log_of_one_plus,
    ),
    Rule(
        code="RO402",
        name="exp-minus-one",
        message="exp(x) - 1 loses the digits of a small x: write torch.expm1(x)",
        why="exp(x) is rounded near 1 before the 1 is taken away. In float32 x = 1e-7 gives 1.19e-7, 19 % off.",
        wrong=_example("torch.exp(x) - 1"),
        right=_example("torch.expm1(x)"),
        check=_exp_minus_one,
    ),
    Rule(
        code="RO403",
        name="log-of-sum-of-exp",
        message="log(sum(exp(x))) overflows: write torch.logsumexp(x, dim)",
        why="exp(x) is Inf from x = 88.8 on in float32 and from 11.1 on in float16; logsumexp subtracts the largest "
        "value first.",
        wrong=_example("torch.log(torch.exp(x).sum(dim=1))"),
        right=_example("torch.logsumexp(x, dim=1)"),
        check=_log_of_sum_of_exp,
    ),
    Rule(
        code="RO404",
        name="log-of-softmax",
        message="log(softmax(x)) is -inf where a probability rounds to 0: write log_softmax(x)",
        why="A probability below 1e-45 in float32, below 6e-8 in float16, is 0: its logarithm is -inf and the "
        "gradient NaN. log_softmax gives the exact value.",
        wrong=_example("torch.log(F.softmax(x, dim=-1))"),
        right=_example("F.log_softmax(x, dim=-1)"),
        check=_log_of_softmax,
    ),
    Rule(
        code="RO405",
        name="log-of-sigmoid",
        message="log(sigmoid(x)) is -inf where the sigmoid rounds to 0: write F.logsigmoid(x)",
        why="In float32 sigmoid(-104) is 0 and its logarithm -inf; 1 - sigmoid(17) is 0 already. F.logsigmoid is "
        "exact for every x.",
        wrong=_example("torch.log(torch.sigmoid(x))"),
        right=_example("F.logsigmoid(x)"),
        check=_log_of_sigmoid,
    ),
    Rule(
        code="RO406",
        name="one-minus-cos",
        message="for a small x, 1 - cos(x) is 0: write 2 * torch.sin(x / 2) ** 2",
        why="cos(x) rounds to 1 for x below 2.4e-4 in float32 and below 0.06 in bfloat16, so that the difference is 0.",
        wrong=_example("1 - torch.cos(x)"),
        right=_example("2 * torch.sin(x / 2) ** 2"),
        check=_one_minus_cos,
    ),
    Rule(
        code="RO407",
        name="divided-by-norm",
        message="x / x.norm() is NaN for a row of zeros: write F.normalize(x, dim=...), or clamp the norm from below",
        why="0 / 0 is NaN, and a padded or dead row is zero. F.normalize takes at least 1e-12 for the norm.",
        wrong=_example("x / x.norm(dim=1, keepdim=True)"),
        right=_example("F.normalize(x, dim=1)"),
        check=_divided_by_norm,
    ),
    Rule(
        code="RO408",
        name="root-at-zero",
        message="sqrt has an infinite gradient at 0, which becomes NaN in the chain: add a small eps inside the root",
        why="The gradient is 1 / (2 sqrt(x)): Inf at 0, and Inf times the 0 of the square is NaN. One pair of equal "
        "rows makes all weights NaN.",
        wrong=_example("torch.sqrt(((x - y) ** 2).sum(dim=1))"),
        right=_example("torch.sqrt(((x - y) ** 2).sum(dim=1) + 1e-12)"),
        check=_root_at_zero,
    ),
    Rule(
        code="RO409",
        name="arc-at-edge",
        message="acos and asin are NaN beyond 1 and have an infinite gradient at 1: clamp the argument inside first",
        why="A cosine of two equal unit vectors rounds to 1.0000001 in float32, of which acos is NaN.",
        wrong=_example("torch.acos((x * y).sum(-1))"),
        right=_example("torch.acos((x * y).sum(-1).clamp(-1 + 1e-7, 1 - 1e-7))"),
        check=_arc_at_edge,
    ),
    Rule(
        code="RO410",
        name="unsafe-branch",
        message="the branch that torch.where does not take has a gradient too, 0 times Inf is NaN: "
        "make the input safe before, with a where inside",
        why="Both branches are computed. Where x is 0, log(x) has the gradient Inf, and the 0 of the branch that is "
        "not taken makes it NaN.",
        wrong=_example("torch.where(x > 0, torch.log(x), torch.zeros_like(x))"),
        right=_example(
            "torch.where(x > 0, torch.log(safe), torch.zeros_like(x))",
            "    safe = torch.where(x > 0, x, torch.ones_like(x))\n",
        ),
        check=_unsafe_branch,
    ),
    Rule(
        code="RO411",
        name="divided-by-std",
        message="the standard deviation is 0 for equal values and NaN for one: add a small eps to it",
        why="A batch of equal rewards, a constant feature, or a last batch of one sample makes the result Inf or NaN.",
        wrong=_example("(x - x.mean()) / x.std()"),
        right=_example("(x - x.mean()) / (x.std() + 1e-8)"),
        check=_divided_by_std,
    ),
    Rule(
        code="RO412",
        name="softmax-by-hand",
        message="exp(x) / exp(x).sum() overflows: write torch.softmax(x, dim)",
        why="exp(x) is Inf from x = 88.8 on in float32 and from 11.1 on in float16, and Inf / Inf is NaN; softmax "
        "subtracts the largest value first.",
        wrong=_example("torch.exp(x) / torch.exp(x).sum(dim=1, keepdim=True)"),
        right=_example("torch.softmax(x, dim=1)"),
        check=_softmax_by_hand,
    ),
)
