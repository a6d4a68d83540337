"""Mixed precision in TensorFlow 1 and 2: loss scale optimizers, policies, graph rewrites."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from roundoff.lint.contexts import text_of
from roundoff.lint.edits import replaced
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.script import Script
from roundoff.lint.tensors import keyword_of

_FRAMEWORKS = ("tensorflow", "keras", "npu_bridge", "tf_keras")
#: What makes a loss scale optimizer of another one, by the last part of its name.
_WRAPPERS = {
    "LossScaleOptimizer",
    "NPULossScaleOptimizer",
    "NpuLossScaleOptimizer",
    "MixedPrecisionLossScaleOptimizer",
    "enable_mixed_precision_graph_rewrite",
}
_TRAINS = ("minimize", "apply_gradients", "compute_gradients", "apply")
_CLIPS = {
    "tensorflow.clip_by_global_norm",
    "tensorflow.clip_by_norm",
    "tensorflow.clip_by_value",
    "tensorflow.linalg.global_norm",
}


def _last(script: Script, call: ast.Call) -> str:
    """Return the last part of what a call calls."""
    name = script.called(call)
    if name is None:
        name = ast.unparse(call.func)
    return name.rpartition(".")[2]


def _wrappers(script: Script) -> list[ast.Call]:
    return [call for call in script.nodes(ast.Call) if _last(script, call) in _WRAPPERS]


def _functions(script: Script) -> Iterator[ast.AST]:
    """Yield each function, and the module without its functions' calls."""
    yield from script.nodes(ast.FunctionDef)
    yield script.tree


def _calls_in(script: Script, scope: ast.AST, name: str) -> list[ast.Call]:
    return [call for call in script.method_calls(name) if script.scope(call) is scope]


def _not_unscaled(script: Script) -> Iterator[Hit]:
    """Gradients of a scaled loss that nothing unscales."""
    if script.method_calls("get_unscaled_gradients"):
        return
    for call in script.method_calls("get_scaled_loss"):
        yield Hit(call)


def _unscaled_only(script: Script) -> Iterator[Hit]:
    """Gradients that are unscaled and never were scaled."""
    if script.method_calls("get_scaled_loss"):
        return
    for call in script.method_calls("get_unscaled_gradients"):
        yield Hit(call)


def _clipped_first(script: Script) -> Iterator[Hit]:
    """Clipping in front of ``get_unscaled_gradients``."""
    for scope in _functions(script):
        unscaled = _calls_in(script, scope, "get_unscaled_gradients")
        if not unscaled:
            continue
        for call in script.calls(*_CLIPS):
            if script.scope(call) is scope and _is_before(call, unscaled[0]):
                yield Hit(call)


def _is_before(first: ast.expr, second: ast.expr) -> bool:
    return (first.lineno, first.col_offset) < (second.lineno, second.col_offset)


def _wrapper_unused(script: Script) -> Iterator[Hit]:
    """A loss scale is made and not used, or the optimizer inside of it trains."""
    for manager in script.nodes(ast.Call):
        if _last(script, manager) in _MANAGERS and _is_never_read(script, manager):
            yield Hit(manager)
    trains = [
        (call, script.things.key(call.func.value))
        for call in script.method_calls(*_TRAINS)
        if isinstance(call.func, ast.Attribute)
    ]
    for wrapper in _wrappers(script):
        if isinstance(script.statement(wrapper), ast.Expr):
            yield Hit(wrapper)
        else:
            yield from _trained_inside(script, wrapper, trains)


def _trained_inside(
    script: Script, wrapper: ast.Call, trains: list[tuple[ast.Call, str | None]]
) -> Iterator[Hit]:
    """Yield the steps of the optimizer that a loss scale optimizer was made of."""
    targets = _targets(script, wrapper)
    outer = {script.things.key(target) for target in targets}
    inner = script.things.key(wrapper.args[0]) if wrapper.args else None
    if inner is None or not outer or inner in outer:
        return
    if any(key in outer for _, key in trains):
        return
    for call, key in trains:
        if key == inner:
            yield Hit(call, edits=_wrapped(script, call, targets[0]))


#: What says how a loss scale moves, for an optimizer that uses it.
_MANAGERS = {
    "FixedLossScaleManager",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "DynamicLossScale",
}


def _is_never_read(script: Script, call: ast.Call) -> bool:
    """Return True where the name that a call's result is assigned to is not read again."""
    statement = script.parent(call)
    if not isinstance(statement, ast.Assign):
        return False
    target = statement.targets[0]
    if not isinstance(target, ast.Name):
        return False
    home = script.home(target)
    return not any(
        isinstance(name.ctx, ast.Load)
        for name in script.nodes(ast.Name)
        if name.id == target.id and script.home(name) is home
    )


def _wrapped(script: Script, call: ast.Call, target: ast.expr) -> tuple[Edit, ...]:
    """Return the fix: the loss scale optimizer trains."""
    if not isinstance(call.func, ast.Attribute) or script.scope(call) is not (
        script.scope(target)
    ):
        return ()
    if call.func.attr != "minimize":
        return ()
    return (replaced(script, call.func.value, ast.unparse(target)),)


def _policy_calls(script: Script, *formats: str) -> list[ast.Call]:
    """Return the calls that set a policy of mixed precision for all layers."""
    return [
        call
        for call in script.nodes(ast.Call)
        if _last(script, call) in ("set_global_policy", "set_policy")
        and call.args
        and _policy_name(script, call.args[0]) in formats
    ]


def _policy_name(script: Script, node: ast.expr) -> str | None:
    """Return the name of a policy: a text, or ``Policy(text)``."""
    value = script.definition(node) or node
    if isinstance(value, ast.Call) and value.args:
        return text_of(script, value.args[0])
    return text_of(script, value)


def _custom_loop_unscaled(script: Script) -> Iterator[Hit]:
    """A custom loop under ``mixed_float16`` without a loss scale."""
    if not _policy_calls(script, "mixed_float16") or _wrappers(script):
        return
    scaled = script.method_calls("get_scaled_loss", "scale_loss")
    if scaled or script.method_calls("compile"):
        return
    for call in script.method_calls("apply_gradients"):
        yield Hit(call)


_LAYERS = ("keras.layers.", "keras.Sequential", "keras.Model", "keras.applications.")


def _policy_after_layers(script: Script) -> Iterator[Hit]:
    """A policy that is set when layers are made already."""
    for policy in _policy_calls(script, "mixed_float16", "mixed_bfloat16"):
        scope = script.scope(policy)
        layers = [
            call
            for call in script.nodes(ast.Call)
            if _is_layer(script.called(call) or "") and script.scope(call) is scope
        ]
        if any(_is_before(layer, policy) for layer in layers):
            yield Hit(policy)


def _is_layer(name: str) -> bool:
    short = name.removeprefix("tensorflow.")
    return short.startswith(_LAYERS) and "mixed_precision" not in short


def _low_output(script: Script) -> Iterator[Hit]:
    """The last softmax of a model under a policy of mixed precision."""
    if not _policy_calls(script, "mixed_float16"):
        return
    for call in script.nodes(ast.Call):
        if _is_softmax(script, call) and keyword_of(call, "dtype") is None:
            yield Hit(call)


def _is_softmax(script: Script, call: ast.Call) -> bool:
    """Return True for a layer of Keras that ends in a softmax."""
    match (script.called(call) or "").removeprefix("tensorflow."):
        case "keras.layers.Softmax":
            return True
        case "keras.layers.Dense":
            return text_of(script, keyword_of(call, "activation")) == "softmax"
        case "keras.layers.Activation":
            return "softmax" in [text_of(script, each) for each in call.args]
        case _:
            return False


_OLD = {
    "tensorflow.keras.mixed_precision.experimental.set_policy": "tf.keras.mixed_precision.set_global_policy",
    "tensorflow.keras.mixed_precision.experimental.Policy": "tf.keras.mixed_precision.Policy",
    "tensorflow.keras.mixed_precision.experimental.LossScaleOptimizer": "tf.keras.mixed_precision.LossScaleOptimizer",
    "tensorflow.train.experimental.enable_mixed_precision_graph_rewrite": "tf.keras.mixed_precision.set_global_policy",
    "tensorflow.train.experimental.MixedPrecisionLossScaleOptimizer": "tf.keras.mixed_precision.LossScaleOptimizer",
    "tensorflow.train.experimental.DynamicLossScale": "tf.keras.mixed_precision.LossScaleOptimizer",
    "tensorflow.train.experimental.FixedLossScale": "tf.keras.mixed_precision.LossScaleOptimizer",
}


#: What only graphs of TensorFlow 1 have, where the old names are the present ones.
_GRAPHS = {
    "Session",
    "placeholder",
    "get_variable",
    "variable_scope",
    "app",
    "estimator",
}


def _is_of_tensorflow_1(script: Script) -> bool:
    """Return True for a script of TensorFlow 1."""
    if any("compat.v1" in name for name in script.imports.values()):
        return True
    names = (script.qualified(each) or "" for each in script.nodes(ast.Attribute))
    return any(
        name.startswith("tensorflow.") and name.split(".")[1] in _GRAPHS
        for name in names
    )


def _old_names(script: Script) -> Iterator[Hit]:
    if _is_of_tensorflow_1(script):
        return
    for name, present in _OLD.items():
        for call in script.calls(name):
            short = name.replace("tensorflow.", "tf.", 1)
            yield Hit(call, f"`{short}` is gone from TensorFlow 2: use `{present}`")


def _not_distributed(script: Script) -> Iterator[Hit]:
    """A loss scale on several devices of which each decides by itself."""
    text = [_last(script, call) for call in script.nodes(ast.Call)]
    several = {"NPUDistributedOptimizer", "npu_distributed_optimizer_wrapper"}
    if not several.intersection(text):
        return
    for call in script.nodes(ast.Call):
        if _last(script, call) != "NPULossScaleOptimizer":
            continue
        settings = {each.arg for each in call.keywords}
        if "is_distributed" not in settings and len(call.args) < 3:
            end = script.span(call)[1] - 1
            edit = Edit(end, end, ", is_distributed=True")
            safe = not script.segment(call).rstrip(")").rstrip().endswith(",")
            yield Hit(call, edits=(edit,) if safe else ())


def _scaled_by_hand(script: Script) -> Iterator[Hit]:
    """``apply_gradients`` of a LossScaleOptimizer of Keras with a plain loss."""
    if script.method_calls("get_scaled_loss", "scale_loss", "get_unscaled_gradients"):
        return
    keras = _keras_wrappers(script)
    if keras or _policy_calls(script, "mixed_float16"):
        yield from _own_steps(script)
    if not script.method_calls("compile"):
        yield from _wrapped_steps(script, keras)


def _wrapped_steps(script: Script, wrappers: list[ast.Call]) -> Iterator[Hit]:
    """``apply_gradients`` of the optimizers that some calls wrap."""
    wrapped = {
        script.things.key(target)
        for call in wrappers
        for target in _targets(script, call)
    }
    for call in script.method_calls("apply_gradients"):
        holder = call.func.value if isinstance(call.func, ast.Attribute) else None
        if script.things.key(holder) in wrapped:
            yield Hit(call)


def _keras_wrappers(script: Script) -> list[ast.Call]:
    """Return the calls that make a loss scale optimizer of Keras."""
    name = "keras.mixed_precision.LossScaleOptimizer"
    return [
        call for call in _wrappers(script) if (script.called(call) or "").endswith(name)
    ]


def _own_steps(script: Script) -> Iterator[Hit]:
    """``train_step`` of a Keras model that steps its compiled optimizer by itself."""
    if not script.method_calls("compile"):
        return
    for call in script.method_calls("apply_gradients", "apply"):
        function = script.scope(call)
        is_own = isinstance(function, ast.FunctionDef) and function.name == "train_step"
        holder = call.func.value if isinstance(call.func, ast.Attribute) else None
        if is_own and holder is not None and ast.unparse(holder) == "self.optimizer":
            yield Hit(call)


def _targets(script: Script, call: ast.Call) -> list[ast.expr]:
    statement = script.statement(call)
    return statement.targets if isinstance(statement, ast.Assign) else []


_KERAS = """\
import tensorflow as tf

optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x))
"""
_RIGHT_STEP = """\
        scaled = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
"""
_POLICY = """\
import tensorflow as tf

tf.keras.mixed_precision.set_global_policy("mixed_float16")
"""
_NPU = """\
import tensorflow as tf
from npu_bridge.npu_init import *

optimizer = tf.train.AdamOptimizer(1e-3)
manager = ExponentialUpdateLossScaleManager(2**32, 1000)
"""


def _rule(
    code: str,
    name: str,
    message: str,
    why: str,
    wrong: str,
    right: str,
    check: Callable[[Script], Iterable[Hit]],
) -> Rule:
    return Rule(code, name, message, why, wrong, right, check, _FRAMEWORKS)


RULES = (
    _rule(
        "RO901",
        "tf-gradients-not-unscaled",
        "the loss is scaled and the gradients are applied as they are: call `optimizer.get_unscaled_gradients(gradients)`",
        "`apply_gradients` does not divide by the scale; the first one of Keras is 32768.",
        _KERAS
        + """\
        scaled = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
""",
        _KERAS + _RIGHT_STEP,
        _not_unscaled,
    ),
    _rule(
        "RO902",
        "tf-loss-not-scaled",
        "gradients are unscaled and the loss was not scaled: call `optimizer.get_scaled_loss(loss)` inside the tape",
        "The gradients are divided by 32768 and the weights hardly move.",
        _KERAS
        + """\
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
""",
        _KERAS + _RIGHT_STEP,
        _unscaled_only,
    ),
    _rule(
        "RO903",
        "tf-clip-before-unscale",
        "gradients are clipped while they have the loss scale: unscale them first",
        "A limit of 1 on gradients with a scale of 32768 is one of 3e-5 on the real ones.",
        _KERAS
        + """\
        scaled = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_variables)
    gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
    gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
""",
        _KERAS
        + """\
        scaled = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(gradients)
    gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
""",
        _clipped_first,
    ),
    _rule(
        "RO904",
        "tf-fp16-without-loss-scale",
        "a custom loop in `mixed_float16` without a loss scale: wrap the optimizer in `LossScaleOptimizer`",
        "`compile` and `fit` do so by themselves, a loop of one's own does not: gradients below 6e-8 become zero.",
        _POLICY
        + """\
optimizer = tf.keras.optimizers.SGD(0.1)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
""",
        _KERAS + _RIGHT_STEP,
        _custom_loop_unscaled,
    ),
    _rule(
        "RO905",
        "tf-old-names",
        "a name that is gone from TensorFlow 2",
        "The experimental names went between TensorFlow 2.4 and 2.13; Keras has a policy in place of the graph rewrite.",
        """\
import tensorflow as tf

tf.keras.mixed_precision.experimental.set_policy("mixed_float16")
""",
        _POLICY,
        _old_names,
    ),
    _rule(
        "RO906",
        "tf-softmax-in-fp16",
        'the last softmax runs in fp16: give it `dtype="float32"`',
        "The loss is taken of probabilities with 11 bits, of which those below 6e-8 are zero: their logarithm is -inf.",
        _POLICY
        + 'model = tf.keras.Sequential([tf.keras.layers.Dense(10, activation="softmax")])\n',
        _POLICY
        + """\
model = tf.keras.Sequential(
    [tf.keras.layers.Dense(10, activation="softmax", dtype="float32")]
)
""",
        _low_output,
    ),
    _rule(
        "RO907",
        "tf-policy-after-layers",
        "the policy is set after layers were made, which keep theirs: set it first",
        "A layer takes the policy when it is made. The script runs in fp32, and nothing says so.",
        """\
import tensorflow as tf

model = tf.keras.Sequential([tf.keras.layers.Dense(10)])
tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
""",
        """\
import tensorflow as tf

tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
model = tf.keras.Sequential([tf.keras.layers.Dense(10)])
""",
        _policy_after_layers,
    ),
    _rule(
        "RO908",
        "tf-loss-scale-unused",
        "a loss scale optimizer is made and the one inside it trains: call `minimize` of the outer one",
        "Nothing is scaled, and overflow is not looked for.",
        _NPU
        + """\
scaled_optimizer = NPULossScaleOptimizer(optimizer, manager)
train_op = optimizer.minimize(loss)
""",
        _NPU
        + """\
scaled_optimizer = NPULossScaleOptimizer(optimizer, manager)
train_op = scaled_optimizer.minimize(loss)
""",
        _wrapper_unused,
    ),
    _rule(
        "RO909",
        "npu-loss-scale-not-distributed",
        "several devices train and each decides by itself whether it overflowed: pass `is_distributed=True`",
        "Where one device overflows it skips the step that the others take, and the weights part.",
        _NPU
        + """\
optimizer = NPULossScaleOptimizer(NPUDistributedOptimizer(optimizer), manager)
train_op = optimizer.minimize(loss)
""",
        _NPU
        + """\
optimizer = NPULossScaleOptimizer(
    NPUDistributedOptimizer(optimizer), manager, is_distributed=True
)
train_op = optimizer.minimize(loss)
""",
        _not_distributed,
    ),
    _rule(
        "RO910",
        "tf-loss-scale-not-used-by-tape",
        "the optimizer scales, and the tape differentiates a loss that isn't scaled: call `get_scaled_loss` and "
        "`get_unscaled_gradients`",
        "In TensorFlow before Keras 3 `apply_gradients` of a `LossScaleOptimizer` scales nothing: fp16 gradients underflow "
        "as without it.",
        _KERAS
        + """\
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
""",
        _KERAS + _RIGHT_STEP,
        _scaled_by_hand,
    ),
)
