"""Losses, and the last layer whose output they are given."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from roundoff.lint.activations import Output, output_of
from roundoff.lint.makers import makers
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.script import Script
from roundoff.lint.tensors import keyword_of

_NAMES = {
    "torch.nn.CrossEntropyLoss": "cross_entropy",
    "torch.nn.functional.cross_entropy": "cross_entropy",
    "torch.nn.NLLLoss": "nll_loss",
    "torch.nn.functional.nll_loss": "nll_loss",
    "torch.nn.BCELoss": "binary_cross_entropy",
    "torch.nn.functional.binary_cross_entropy": "binary_cross_entropy",
    "torch.nn.BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "torch.nn.functional.binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "torch.nn.MultiLabelSoftMarginLoss": "binary_cross_entropy_with_logits",
    "torch.nn.KLDivLoss": "kl_div",
    "torch.nn.functional.kl_div": "kl_div",
}


@dataclass(frozen=True, eq=False)
class LossCall:
    """A loss that is computed: its name, the call, what made it, and what it judges."""

    name: str
    call: ast.Call
    options: ast.Call
    output: Output | None


@functools.lru_cache(maxsize=1)  # many rules ask the same script one after the other
def loss_calls(script: Script) -> tuple[LossCall, ...]:
    """Return each call of a loss, of a function or of a module that the script makes."""
    calls = []
    for call in script.nodes(ast.Call):
        for name, options in _losses_of(script, call):
            judged = call.args[0] if call.args else keyword_of(call, "input")
            calls.append(LossCall(name, call, options, output_of(script, judged)))
    return tuple(calls)


def _losses_of(script: Script, call: ast.Call) -> Iterator[tuple[str, ast.Call]]:
    called = script.called(call)
    if called is not None:
        if called.startswith("torch.nn.functional.") and called in _NAMES:
            yield _NAMES[called], call
    elif script.function_of(call) is None and (call.args or call.keywords):
        yield from _module_called(script, call)


def _module_called(script: Script, call: ast.Call) -> Iterator[tuple[str, ast.Call]]:
    """Yield the loss of a module that is called, and the call that made it."""
    several = {
        (_NAMES.get(script.called(maker) or ""), maker)
        for maker in makers(script, call.func)
    }
    if len({name for name, _ in several}) == 1:
        name, maker = several.pop()
        if name is not None:
            yield name, maker


def _judging(
    name: str, messages: Mapping[Output, str]
) -> Callable[[Script], Iterator[Hit]]:
    """Return the check for a loss that is given one of these outputs."""

    def check(script: Script) -> Iterator[Hit]:
        for each in loss_calls(script):
            output = each.output
            if each.name == name and output is not None and output in messages:
                yield Hit(each.call, messages[output])

    return check


def _kl_mean(script: Script) -> Iterator[Hit]:
    for each in loss_calls(script):
        if each.name != "kl_div":
            continue
        reduction = keyword_of(each.options, "reduction")
        is_mean = isinstance(reduction, ast.Constant) and reduction.value == "mean"
        has_other = keyword_of(each.options, "size_average") is not None
        if is_mean and reduction is not None:
            start, end = script.span(reduction)
            yield Hit(each.call, edits=(Edit(start, end, '"batchmean"'),))
        elif reduction is None and not has_other and not _has_star(each.options):
            yield Hit(each.call)


def _has_star(call: ast.Call) -> bool:
    return any(keyword.arg is None for keyword in call.keywords)


def _softmax_without_dim(script: Script) -> Iterator[Hit]:
    functions = ("softmax", "log_softmax", "softmin")
    names = [f"torch.nn.functional.{each}" for each in functions]
    for call in script.calls(*names):
        if len(call.args) == 1 and not call.keywords:
            yield Hit(call)
    for call in script.calls("torch.nn.Softmax", "torch.nn.LogSoftmax"):
        if not call.args and not call.keywords:
            yield Hit(call)


def _example(line: str, before: str = "") -> str:
    return (
        "import torch\nimport torch.nn.functional as F\n\n\n"
        f"def objective(logits, target):\n{before}    return {line}\n"
    )


RULES = (
    Rule(
        code="RO501",
        name="cross-entropy-of-probabilities",
        message="cross entropy takes logits and applies softmax itself: a second one keeps the loss from reaching 0",
        why="With softmax in front the loss of three classes never falls below 0.55 (measured), gradients shrink, and "
        "the network learns slowly or not at all.",
        wrong=_example(
            "F.cross_entropy(p, target)", "    p = F.softmax(logits, dim=1)\n"
        ),
        right=_example("F.cross_entropy(logits, target)"),
        check=_judging(
            "cross_entropy",
            {
                Output.SOFTMAX: "cross entropy takes logits and applies softmax itself, and is given "
                "softmax's output: pass the logits",
                Output.SIGMOID: "cross entropy takes logits and applies softmax itself, and is given "
                "sigmoid's output: pass the logits",
            },
        ),
    ),
    Rule(
        code="RO502",
        name="cross-entropy-of-log-softmax",
        message="cross entropy applies log_softmax itself, and is given its output: pass the logits, or use NLLLoss",
        why="log_softmax of log_softmax is the same again, so that the loss is right; it costs a pass over the logits, and "
        "one more rounding of each.",
        wrong=_example(
            "F.cross_entropy(p, target)", "    p = F.log_softmax(logits, dim=1)\n"
        ),
        right=_example(
            "F.nll_loss(p, target)", "    p = F.log_softmax(logits, dim=1)\n"
        ),
        check=_judging("cross_entropy", {Output.LOG_SOFTMAX: ""}),
    ),
    Rule(
        code="RO503",
        name="nll-of-no-log-probabilities",
        message="NLLLoss takes log-probabilities: give it log_softmax's output, or the logits to cross entropy",
        why="NLLLoss only picks an element and negates it. Of softmax's output it is between -1 and 0 with gradients of one "
        "size; of logits it has no lower bound.",
        wrong=_example("F.nll_loss(p, target)", "    p = F.softmax(logits, dim=1)\n"),
        right=_example("F.cross_entropy(logits, target)"),
        check=_judging(
            "nll_loss",
            {
                Output.SOFTMAX: "NLLLoss takes log-probabilities, and is given softmax's output: use log_softmax",
                Output.SIGMOID: "NLLLoss takes log-probabilities, and is given sigmoid's output: use "
                "log_softmax on the logits",
                Output.LOGITS: "NLLLoss takes log-probabilities, and is given logits: use cross "
                "entropy, or log_softmax before",
            },
        ),
    ),
    Rule(
        code="RO504",
        name="bce-of-logits",
        message="BCELoss takes probabilities, and is given logits: use BCEWithLogitsLoss",
        why="Logits outside of 0 to 1 raise an error; those inside train towards the wrong thing.",
        wrong="""\
import torch
from torch import nn

model = nn.Linear(4, 1)
criterion = nn.BCELoss()
loss = criterion(model(x), y)
""",
        right="""\
import torch
from torch import nn

model = nn.Linear(4, 1)
criterion = nn.BCEWithLogitsLoss()
loss = criterion(model(x), y)
""",
        check=_judging(
            "binary_cross_entropy", {Output.LOGITS: "", Output.LOG_SOFTMAX: ""}
        ),
    ),
    Rule(
        code="RO505",
        name="bce-of-sigmoid",
        message="BCELoss of sigmoid is off where the sigmoid rounds to 1: pass the logits to BCEWithLogitsLoss",
        why="BCE(sigmoid(20), 0) is 100 and its gradient 0 or huge, with logits it is 20 (measured). "
        "CUDA's autocast refuses "
        "BCELoss.",
        wrong=_example(
            "F.binary_cross_entropy(p, target)", "    p = torch.sigmoid(logits)\n"
        ),
        right=_example("F.binary_cross_entropy_with_logits(logits, target)"),
        check=_judging("binary_cross_entropy", {Output.SIGMOID: ""}),
    ),
    Rule(
        code="RO506",
        name="bce-with-logits-of-probabilities",
        message="BCEWithLogitsLoss applies sigmoid itself, and is given probabilities: pass the logits",
        why="sigmoid of a probability lies between 0.5 and 0.73: the loss of a negative never falls below 0.69.",
        wrong=_example(
            "F.binary_cross_entropy_with_logits(p, target)",
            "    p = torch.sigmoid(logits)\n",
        ),
        right=_example("F.binary_cross_entropy_with_logits(logits, target)"),
        check=_judging(
            "binary_cross_entropy_with_logits",
            {Output.SIGMOID: "", Output.SOFTMAX: "", Output.LOG_SOFTMAX: ""},
        ),
    ),
    Rule(
        code="RO507",
        name="kl-div-of-no-log-probabilities",
        message="kl_div takes log-probabilities first: give it log_softmax's output",
        why="kl_div(input, target) is target * (log(target) - input). Of probabilities it is no divergence: its least value "
        "is not where the two agree.",
        wrong=_example(
            'F.kl_div(p, target, reduction="batchmean")',
            "    p = F.softmax(logits, dim=1)\n",
        ),
        right=_example(
            'F.kl_div(p, target, reduction="batchmean")',
            "    p = F.log_softmax(logits, dim=1)\n",
        ),
        check=_judging(
            "kl_div",
            {
                Output.SOFTMAX: "kl_div takes log-probabilities first, and is given softmax's output: use log_softmax",
                Output.SIGMOID: "kl_div takes log-probabilities first, and is given sigmoid's output: use logsigmoid",
                Output.LOGITS: "kl_div takes log-probabilities first, and is given logits: use log_softmax",
            },
        ),
    ),
    Rule(
        code="RO508",
        name="kl-div-mean",
        message='kl_div divides by the number of elements, not of samples: write reduction="batchmean"',
        why="The divergence is a sum over classes. The mean over all elements is smaller by the number of classes, as the "
        "learning rate were.",
        wrong=_example("F.kl_div(F.log_softmax(logits, dim=1), target)"),
        right=_example(
            'F.kl_div(F.log_softmax(logits, dim=1), target, reduction="batchmean")'
        ),
        check=_kl_mean,
    ),
    Rule(
        code="RO509",
        name="softmax-without-dim",
        message="softmax without a dimension picks one by the number of dimensions: name it",
        why="It takes dimension 0 for tensors of 0, 1 and 3 dimensions: a batch of sequences is normalized over the batch.",
        wrong=_example("F.softmax(logits)"),
        right=_example("F.softmax(logits, dim=-1)"),
        check=_softmax_without_dim,
    ),
)
