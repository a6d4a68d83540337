"""The training loop: gradients cleared, graphs freed, modes switched, errors not hidden."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from roundoff.lint.edits import line_before
from roundoff.lint.events import Act, Event, Loop
from roundoff.lint.makers import makers
from roundoff.lint.modes import (
    is_without_gradients,
    judges_by_name,
    turns_off_gradients,
)
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.rules.kept_graphs import graph_kept
from roundoff.lint.rules.loop_errors import RULES as ERROR_RULES
from roundoff.lint.script import Script
from roundoff.lint.things import Kind

_STEPS = (Act.STEP, Act.SCALER_STEP)
_CLEARS = re.compile(
    r"grad(?:\.data)?\.zero_\(|\.grad\s*=\s*None|zero_?grad|clear_grad"
)


def _is_managed(loop: Loop) -> bool:
    return any(event.is_managed for event in loop.of(Act.BACKWARD, *_STEPS))


def _is_statement(loop: Loop) -> bool:
    """Return True for a loop of the script, False for a function that others call."""
    return isinstance(loop.node, ast.For | ast.AsyncFor | ast.While)


def _no_zero_grad(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        backward = loop.of(Act.BACKWARD)
        steps = loop.of(*_STEPS)
        if not backward or not steps or _is_managed(loop) or not _is_statement(loop):
            continue
        if loop.of(Act.ZERO_GRAD) or _CLEARS.search(_text_of(script, loop)):
            continue
        if steps[0].conditions and _CLEARS.search(script.text):
            continue
        first = backward[0]
        yield Hit(first.node, edits=_zero_grad_edit(script, first, steps))


def _text_of(script: Script, loop: Loop) -> str:
    """Return the text of a loop and of the functions that it calls."""
    functions = {script.scope(event.node) for event in loop.events}
    parts = [loop.node, *(each for each in functions if not _holds(each, loop.node))]
    return "\n".join(ast.unparse(part) for part in parts)


def _holds(scope: ast.AST, node: ast.AST) -> bool:
    return any(each is node for each in ast.walk(scope))


def _zero_grad_edit(
    script: Script, backward: Event, steps: list[Event]
) -> tuple[Edit, ...]:
    """Return the line that clears the gradients, in front of the backward pass."""
    nodes = [step.node for step in steps]
    if len(nodes) != 1 or steps[0].conditions or backward.conditions:
        return ()
    call = nodes[0]
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return ()
    if script.scope(call) is not script.scope(backward.node):
        return ()
    is_plain = steps[0].act is Act.STEP
    optimizer = call.func.value if is_plain else next(iter(call.args), None)
    if optimizer is None:
        return ()
    text = f"{script.segment(optimizer)}.zero_grad()"
    return line_before(script, script.statement(backward.node), text)


def _zero_grad_too_early(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        for clear in loop.of(Act.ZERO_GRAD):
            if _erases(loop, clear):
                yield Hit(clear.node)


def _erases(loop: Loop, clear: Event) -> bool:
    """Return True where gradients are cleared between the backward pass and the step."""
    if not loop.before(clear, Act.BACKWARD) or loop.before(clear, *_STEPS):
        return False
    after = loop.after(clear, *_STEPS, Act.BACKWARD)
    if not after or after[0].act is Act.BACKWARD or not after[0].implies(clear):
        return False
    step = after[0].subject
    if step is None or clear.subject is None or step.key == clear.subject.key:
        return True
    return clear.subject.kind is Kind.MODEL and _has_one_optimizer(loop)


def _has_one_optimizer(loop: Loop) -> bool:
    return len({step.subject for step in loop.of(*_STEPS)}) == 1


def _step_before_backward(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        steps = loop.of(*_STEPS)
        if len(steps) != 1 or _is_managed(loop):
            continue
        step = steps[0]
        is_first = not loop.before(step, Act.BACKWARD)
        later = loop.after(step, Act.BACKWARD)
        has_closure = bool(getattr(step.node, "args", ()))
        is_cleared = bool(loop.before(step, Act.ZERO_GRAD))
        is_plain = not step.conditions and not has_closure
        if is_first and later and is_cleared and is_plain:
            yield Hit(step.node)


def _judged_in_training_mode(script: Script) -> Iterator[Hit]:
    for program in script.programs:
        trained = {each.subject for each in program.of(Act.FORWARD)}
        if not program.of(Act.BACKWARD) or not trained:
            continue
        functions: set[ast.AST] = set()
        for forward in program.of(Act.FORWARD):
            place = script.in_loop(forward.node)
            if place is None or place in functions:
                continue
            if _is_judging(script, program, forward, place):
                functions.add(place)
                yield Hit(forward.node)


def _is_judging(script: Script, program: Loop, forward: Event, place: ast.AST) -> bool:
    """Return True for a loop over held-out data without gradients and without eval()."""
    if program.before(forward, Act.EVAL) or not _is_over_held_out(script, place):
        return False
    if isinstance(forward.node, ast.Call) and _has_one_mode(script, forward.node.func):
        return False
    if any(event.node is forward.node for event in _training_events(script, forward)):
        return False
    if not is_without_gradients(script, forward.node):
        return any(turns_off_gradients(script, each) for each in forward.contexts)
    return True


_MODES = re.compile(r"(?i)dropout|batch_?norm|instance_?norm|self\.training")


def _has_one_mode(script: Script, model: ast.expr) -> bool:
    """Return True for a model whose layers all stand in the script, and do the same in
    training and evaluation.
    """
    if _MODES.search(script.text):
        return False
    several = makers(script, model)
    return bool(several) and all(_is_written_here(script, call) for call in several)


def _is_written_here(script: Script, call: ast.Call) -> bool:
    name = script.called(call)
    if name is not None:
        return name.startswith("torch.nn.") and "Transformer" not in name
    return script.things.script_class(call) is not None


def _training_events(script: Script, forward: Event) -> list[Event]:
    return [
        event
        for loop in script.loops
        if _is_statement(loop) and loop.node in forward.loops[-1:]
        for event in loop.of(Act.FORWARD)
    ]


def _is_over_held_out(script: Script, place: ast.AST) -> bool:
    """Return True where the loop or its function says evaluation by name."""
    iterated = getattr(place, "iter", None)
    if iterated is not None and judges_by_name(ast.unparse(iterated).replace(".", "_")):
        return True
    return judges_by_name(getattr(script.scope(place), "name", ""))


def _judged_with_gradients(script: Script) -> Iterator[Hit]:
    functions: set[ast.AST] = set()
    for program in script.programs:
        for forward in program.of(Act.FORWARD):
            scope = script.scope(forward.node)
            if scope not in functions and _builds_graph(script, program, forward):
                functions.add(scope)
                yield Hit(forward.node, edits=_no_grad_edit(script, scope))


_TAKES_GRADIENTS = re.compile(
    r"set_grad_enabled|autograd\.grad|requires_grad|\.backward\(|no_grad|inference_mode|torch\.onnx|\.trace\("
)


def _builds_graph(script: Script, program: Loop, forward: Event) -> bool:
    """Return True for a forward pass in a loop, behind eval() in the same function, whose
    graph nobody uses.
    """
    loop = script.in_loop(forward.node)
    if loop is None or is_without_gradients(script, forward.node):
        return False
    if not _is_behind_eval(script, program, forward):
        return False
    if any(turns_off_gradients(script, each) for each in forward.contexts):
        return False
    scope = script.scope(forward.node)
    function = loop if isinstance(scope, ast.Module) else scope
    return not _TAKES_GRADIENTS.search(ast.unparse(function))


def _is_behind_eval(script: Script, program: Loop, forward: Event) -> bool:
    """Return True where the last mode that a function sets before a call is eval()."""
    scope = script.scope(forward.node)
    modes = [
        event
        for event in program.before(forward, Act.EVAL, Act.TRAIN)
        if script.scope(event.node) is scope and _is_alike(event, forward)
    ]
    return bool(modes) and modes[-1].act is Act.EVAL


def _is_alike(mode: Event, forward: Event) -> bool:
    """Return True where a mode is switched of the model that is called, or of its parts."""
    if mode.subject is None or forward.subject is None:
        return True
    return mode.subject.key == forward.subject.key


def _no_grad_edit(script: Script, scope: ast.AST) -> tuple[Edit, ...]:
    if not isinstance(scope, ast.FunctionDef) or scope.decorator_list:
        return ()
    if script.imports.get("torch") != "torch":
        return ()
    if any(script.scope(event.node) is scope for event in _backwards(script)):
        return ()
    return line_before(script, scope, "@torch.no_grad()")


def _backwards(script: Script) -> list[Event]:
    return [event for loop in script.programs for event in loop.of(Act.BACKWARD)]


def _not_trained_again(script: Script) -> Iterator[Hit]:
    nodes: set[ast.AST] = set()
    for program in script.programs:
        for switch in program.of(Act.EVAL):
            if switch.node in nodes or _has_one_mode(script, _switched(switch)):
                continue
            if _stays_off(program, switch):
                nodes.add(switch.node)
                yield Hit(switch.node, edits=_train_edit(script, switch))


def _switched(switch: Event) -> ast.expr:
    """Return what ``eval()`` is called on."""
    node = switch.node
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.value if is_method else ast.Constant(None)  # type: ignore[attr-defined]


def _stays_off(program: Loop, switch: Event) -> bool:
    """Return True where a later round of a loop trains in the mode of evaluation."""
    if not switch.loops:
        return False
    inside = [event for event in program.events if switch.loops[0] in event.loops]
    acts = {event.act for event in inside}
    if Act.BACKWARD not in acts or Act.TRAIN in acts:
        return False
    return _is_trained(inside, switch)


def _is_trained(inside: list[Event], switch: Event) -> bool:
    """Return True where the model of an ``eval()`` was called before it in the loop."""
    subject = switch.subject
    called = {
        event.subject
        for event in inside
        if event.act is Act.FORWARD and event.order < switch.order
    }
    return subject is None or not called or subject in called


def _train_edit(script: Script, switch: Event) -> tuple[Edit, ...]:
    """Return the line that switches back, at the start of the loop's body."""
    call = switch.node
    loop = switch.loops[0]
    if not isinstance(loop, ast.For | ast.While) or not isinstance(call, ast.Call):
        return ()
    if script.scope(call) is not script.scope(loop) or call.args:
        return ()
    function = call.func
    if not isinstance(function, ast.Attribute):
        return ()
    text = f"{script.segment(function.value)}.train()"
    return line_before(script, loop.body[0], text)


def _replaced_after_optimizer(script: Script) -> Iterator[Hit]:
    for create in script.nodes(ast.Call):
        name = script.called(create) or ""
        if not name.startswith("torch.optim.") or "lr_scheduler" in name:
            continue
        if not create.args:
            continue
        model = _model_of(create.args[0])
        if model is not None and not script.method_calls("add_param_group"):
            yield from _replaced(script, create, model)


def _model_of(parameters: ast.expr) -> str | None:
    if not isinstance(parameters, ast.Call):
        return None
    function = parameters.func
    if not isinstance(function, ast.Attribute) or function.attr != "parameters":
        return None
    return ast.unparse(function.value)


def _replaced(script: Script, create: ast.Call, model: str) -> Iterator[Hit]:
    """Yield assignments of new layers to a model behind its optimizer."""
    for assign in script.nodes(ast.Assign):
        if script.scope(assign) is not script.scope(create):
            continue
        if assign.lineno <= create.lineno or not isinstance(assign.value, ast.Call):
            continue
        if not _is_new_part(script, assign.value):
            continue
        targets = [ast.unparse(each) for each in assign.targets]
        is_part = any(target.startswith(model + ".") for target in targets)
        if is_part and not _is_made_again(script, create, assign, model):
            yield Hit(assign)


def _is_new_part(script: Script, call: ast.Call) -> bool:
    """Return True where a call makes a layer or a parameter."""
    is_layer = script.things.kind(call) is Kind.MODEL
    return is_layer or script.called(call) == "torch.nn.Parameter"


def _is_made_again(
    script: Script, create: ast.Call, assign: ast.Assign, model: str
) -> bool:
    """Return True where another optimizer of the model is made behind."""
    for call in script.nodes(ast.Call):
        name = script.called(call) or ""
        if name.startswith("torch.optim.") and call is not create and call.args:
            same = _model_of(call.args[0]) == model
            if same and call.lineno > assign.lineno:
                return True
    return False


def _unseeded_comparison(script: Script) -> Iterator[Hit]:
    if re.search(r"(?i)seed", script.text):
        return
    training = {node for event in _backwards(script) for node in event.loops}
    for loop in script.nodes(ast.For):
        if loop not in training or not _is_choice(script, loop):
            continue
        for call in _calls_inside(loop):
            if script.things.kind(call) is Kind.MODEL and _is_made(script, call):
                yield Hit(call)
                break


def _is_choice(script: Script, loop: ast.For) -> bool:
    """Return True for a loop over several things that are written down."""
    values: ast.expr | None = loop.iter
    if isinstance(values, ast.Name):
        values = script.definition(values)
    if not isinstance(values, ast.List | ast.Tuple) or len(values.elts) < 2:
        return False
    return all(isinstance(each, ast.Constant | ast.Tuple) for each in values.elts)


def _calls_inside(loop: ast.For) -> Iterator[ast.Call]:
    for statement in loop.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                yield node


def _is_made(script: Script, call: ast.Call) -> bool:
    """Return True for ``Net()``, not for ``model.train()``."""
    return script.called(call) is not None or isinstance(call.func, ast.Name)


_LOOP = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""
_NO_CLEAR = _LOOP.replace("    optimizer.zero_grad()\n", "")
_JUDGE = """\


def evaluate(model, loader):
{mode}    hits = 0
{context}        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum()
    return hits


for epoch in range(3):
    model.train()
"""
_EPOCH = _LOOP.replace("\n", "\n    ").rstrip(" ")
_JUDGED = "    " + _EPOCH + "    evaluate(model, valid_loader)\n"


def _judging_script(mode: str, context: str, train: str = "    model.train()\n") -> str:
    head = _JUDGE.format(mode=mode, context=context)
    return "import torch\n" + head.replace("    model.train()\n", train) + _JUDGED


_NO_GRAD = "    with torch.no_grad():\n"
_WITH_GRAPH = "    if True:\n"

RULES = (
    Rule(
        code="RO601",
        name="no-zero-grad",
        message="gradients are never cleared, so that each step takes the sum of all before: call "
        "optimizer.zero_grad() in the loop",
        why="backward() adds to p.grad. Without zero_grad() the step of batch 100 goes along the gradients of 100 batches.",
        wrong="import torch\n\n" + _NO_CLEAR,
        right="import torch\n\n" + _LOOP,
        check=_no_zero_grad,
    ),
    Rule(
        code="RO602",
        name="graph-kept",
        message="the sum keeps the graph of every step in memory: add loss.detach() or loss.item()",
        why="Each loss holds the graph that made it. Memory grows from step to step, until the epoch ends or the machine is "
        "out of it.",
        wrong="import torch\n\ntotal = 0.0\n" + _LOOP + "    total += loss\n",
        right="import torch\n\ntotal = 0.0\n" + _LOOP + "    total += loss.detach()\n",
        check=graph_kept,
    ),
    Rule(
        code="RO603",
        name="judged-in-training-mode",
        message="the model is judged while dropout drops and batch statistics are updated: call model.eval() before",
        why="BatchNorm normalizes by the statistics of the validation batch and mixes them into its own; no_grad() does not "
        "change that.",
        wrong=_judging_script("", _NO_GRAD),
        right=_judging_script("    model.eval()\n", _NO_GRAD),
        check=_judged_in_training_mode,
    ),
    Rule(
        code="RO604",
        name="judged-with-gradients",
        message="a graph is built for outputs that are only judged: put torch.no_grad() around it, or above the function",
        why="Every activation is kept for a backward pass that never comes: several times the memory, and time for it.",
        wrong=_judging_script("    model.eval()\n", _WITH_GRAPH),
        right=_judging_script("    model.eval()\n", _NO_GRAD),
        check=_judged_with_gradients,
    ),
    Rule(
        code="RO605",
        name="not-trained-again",
        message="eval() stays on for the next epoch: call model.train() before training goes on",
        why="From the second epoch on dropout does nothing and BatchNorm uses statistics that never change again.",
        wrong=_judging_script("    model.eval()\n", _NO_GRAD, ""),
        right=_judging_script("    model.eval()\n", _NO_GRAD),
        check=_not_trained_again,
    ),
    Rule(
        code="RO606",
        name="replaced-after-optimizer",
        message="this layer is put in after the optimizer took the model's parameters: it is never "
        "trained; make the optimizer behind it",
        why="An optimizer holds the parameters that it was given. It goes on changing those of the "
        "old layer, which nothing uses.",
        wrong="import torch\nfrom torch import nn\n\nmodel = build()\noptimizer = "
        "torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model.fc = nn.Linear(512, 10)\n",
        right="import torch\nfrom torch import nn\n\nmodel = build()\nmodel.fc = nn.Linear(512, 10)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        check=_replaced_after_optimizer,
    ),
    *ERROR_RULES,
    Rule(
        code="RO610",
        name="unseeded-comparison",
        message="what is compared starts from other random weights each time: call "
        "torch.manual_seed() before each model is made",
        why="Runs that differ in the seed alone differ by a percent of accuracy on small data: the "
        "comparison may show just that.",
        wrong="import torch\nfrom torch import nn\n\nfor rate in [0.1, 0.01]:\n    model = nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=rate)\n    " + _EPOCH,
        right="import torch\nfrom torch import nn\n\nfor rate in [0.1, 0.01]:\n    "
        "torch.manual_seed(0)\n    model = nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=rate)\n    " + _EPOCH,
        check=_unseeded_comparison,
    ),
    Rule(
        code="RO611",
        name="cleared-before-step",
        message="the gradients are cleared between backward() and step(), so that the step has none: "
        "clear them before backward()",
        why="The optimizer finds no gradient and changes nothing, in each step.",
        wrong="import torch\n\n"
        + _NO_CLEAR.replace(
            "    optimizer.step()", "    optimizer.zero_grad()\n    optimizer.step()"
        ),
        right="import torch\n\n" + _LOOP,
        check=_zero_grad_too_early,
    ),
    Rule(
        code="RO612",
        name="step-before-backward",
        message="the step comes behind zero_grad() and before backward(), so that it has no "
        "gradients: step after backward()",
        why="The gradients of a batch are cleared at the start of the next round, before the optimizer has used them.",
        wrong="import torch\n\n"
        + _LOOP.replace("    optimizer.step()\n", "").replace(
            "zero_grad()\n", "zero_grad()\n    optimizer.step()\n"
        ),
        right="import torch\n\n" + _LOOP,
        check=_step_before_backward,
    ),
)
