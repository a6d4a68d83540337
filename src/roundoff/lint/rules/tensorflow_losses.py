"""Losses and activations in TensorFlow: logits where logits are expected."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.contexts import text_of
from roundoff.lint.rule import Hit, Rule
from roundoff.lint.script import Script
from roundoff.lint.tensors import keyword_of, sources

_FRAMEWORKS = ("tensorflow", "keras", "tf_keras")
_SOFTMAX = {"tensorflow.nn.softmax", "keras.activations.softmax"}
_SIGMOID = {"tensorflow.nn.sigmoid", "tensorflow.sigmoid"}
#: Losses that take logits, and what must not stand in front of them.
_LOGIT_LOSSES = {
    "tensorflow.nn.softmax_cross_entropy_with_logits": _SOFTMAX,
    "tensorflow.nn.softmax_cross_entropy_with_logits_v2": _SOFTMAX,
    "tensorflow.nn.sparse_softmax_cross_entropy_with_logits": _SOFTMAX,
    "tensorflow.losses.softmax_cross_entropy": _SOFTMAX,
    "tensorflow.losses.sparse_softmax_cross_entropy": _SOFTMAX,
    "tensorflow.nn.sigmoid_cross_entropy_with_logits": _SIGMOID,
    "tensorflow.losses.sigmoid_cross_entropy": _SIGMOID,
}
#: Losses of Keras, and the activation that makes their probabilities.
_KERAS_LOSSES = {
    "SparseCategoricalCrossentropy": "softmax",
    "CategoricalCrossentropy": "softmax",
    "BinaryCrossentropy": "sigmoid",
}
_SAME_VALUES = {
    f"tensorflow.{name}"
    for name in ("identity", "reshape", "squeeze", "cast", "expand_dims", "transpose")
}
#: Which of several values, by its place; None for the only one.
_Place = int | None
_DEEPEST = 8
_MISSING = (
    "the network ends in logits and the loss takes them for probabilities: pass "
    "`from_logits=True`"
)


def _name(script: Script, call: ast.AST) -> str:
    """Return what a call calls, the same for all ways to import TensorFlow and Keras."""
    name = (script.called(call) or "").replace("tensorflow.compat.v1.", "tensorflow.")
    return name.replace("tensorflow.keras.", "keras.").replace("tf_keras.", "keras.")


def _activation_first(script: Script) -> Iterator[Hit]:
    """Probabilities for a loss that takes logits."""
    for call in script.nodes(ast.Call):
        activations = _LOGIT_LOSSES.get(_name(script, call))
        if activations is None:
            continue
        logits = _second_or(call, "logits")
        if logits is not None and _ends_with(script, logits, None, activations):
            yield Hit(call)


def _second_or(call: ast.Call, name: str) -> ast.expr | None:
    """Return an argument that stands at the second place, or has a name."""
    value = keyword_of(call, name)
    if value is not None:
        return value
    return call.args[1] if len(call.args) > 1 else None


def _ends_with(
    script: Script,
    node: ast.expr | None,
    element: _Place,
    activations: set[str],
    depth: int = 0,
) -> bool:
    """Return True where every value that an expression may be comes from an activation."""
    if depth > _DEEPEST:
        return False
    if isinstance(node, ast.Call) and _is_activation(script, node, activations):
        return True
    several = _origins(script, node, element)
    return bool(several) and all(
        _ends_with(script, value, place, activations, depth + 1)
        for value, place in several
    )


def _origins(
    script: Script, node: ast.expr | None, element: _Place
) -> list[tuple[ast.expr, _Place]]:
    """Return the expressions that hand their values, or one of them, to this one."""
    match node:
        case ast.Name() | ast.Attribute():
            return [
                (value, element if place is None else place)
                for value, place in sources(script, node)
                if value is not node
            ]
        case ast.Tuple() | ast.List() if element is not None:
            return [(part, None) for part in node.elts[element : element + 1]]
        case ast.Call():
            return [(value, element) for value in _handed_on(script, node)]
        case _:
            return []


def _is_activation(script: Script, call: ast.Call, activations: set[str]) -> bool:
    """Return True for the activation itself, and for a layer that ends in it."""
    options = [_activates(script, each, activations) for each in call.keywords]
    return _name(script, call) in activations or any(options)


def _handed_on(script: Script, call: ast.Call) -> list[ast.expr]:
    """Return what a call hands on as it is, or what a function of the script returns."""
    if _name(script, call) in _SAME_VALUES:
        return call.args[:1]
    helper = script.function_of(call)
    return [] if helper is None else script.things.returned(helper)


def _activates(script: Script, option: ast.keyword, activations: set[str]) -> bool:
    """Return True for ``activation=tf.nn.softmax`` and ``activation="softmax"``."""
    if option.arg not in ("activation", "activation_fn"):
        return False
    text = text_of(script, option.value)
    name = (script.qualified(option.value) or "").replace(".compat.v1.", ".")
    return name in activations or f"tensorflow.nn.{text}" in activations


def _from_logits(script: Script) -> Iterator[Hit]:
    """A loss of Keras that expects logits of a network that ends in probabilities."""
    for call in script.nodes(ast.Call):
        name = _name(script, call)
        activation = _KERAS_LOSSES.get(name.rpartition(".")[2])
        if activation is None or not name.startswith("keras.losses."):
            continue
        expects = keyword_of(call, "from_logits")
        takes_logits = isinstance(expects, ast.Constant) and expects.value is True
        if takes_logits and _ends_in(script, activation):
            yield Hit(call)
        elif expects is None and _ends_in(script, None):
            yield Hit(call, _MISSING)


def _ends_in(script: Script, activation: str | None) -> bool:
    """Return True where every network of a script certainly ends in an activation."""
    last = [_last_layer(script, call) for call in script.nodes(ast.Call)]
    ends = [each for each in last if each is not None]
    if not ends:
        ends = _outputs(script) if activation is not None else []
    return bool(ends) and all(_activation(script, each) == activation for each in ends)


def _last_layer(script: Script, call: ast.Call) -> ast.Call | None:
    """Return the last layer of ``keras.Sequential([...])``."""
    if not _name(script, call).endswith("keras.Sequential") or not call.args:
        return None
    layers = call.args[0]
    if not isinstance(layers, ast.List) or not layers.elts:
        return None
    last = layers.elts[-1]
    return last if isinstance(last, ast.Call) else None


def _outputs(script: Script) -> list[ast.Call]:
    """Return the layers with an activation that only an output has."""
    return [
        call
        for call in script.nodes(ast.Call)
        if _name(script, call) == "keras.layers.Dense"
        and _activation(script, call) in ("softmax", "sigmoid")
    ]


def _activation(script: Script, layer: ast.Call) -> str | None:
    """Return the activation of a layer: its argument, or the layer itself."""
    name = _name(script, layer)
    if name == "keras.layers.Softmax":
        return "softmax"
    if name == "keras.layers.Activation" and layer.args:
        return text_of(script, layer.args[0])
    if name != "keras.layers.Dense":
        return "unknown"
    value = _second_or(layer, "activation")
    return None if value is None else _named_activation(script, value)


def _named_activation(script: Script, value: ast.expr) -> str:
    """Return ``softmax`` of ``"softmax"`` and of ``tf.nn.softmax``."""
    last_name = (script.qualified(value) or "").rpartition(".")[2]
    return text_of(script, value) or last_name or "unknown"


RULES = (
    Rule(
        code="RO911",
        name="tf-activation-before-logits-loss",
        message="the loss takes logits and gets probabilities: pass what stands before the softmax or sigmoid",
        why="The activation is applied twice: with three classes the loss cannot fall below 0.55, and gradients vanish "
        "where the network is sure.",
        wrong="""\
import tensorflow as tf

logits = model(x)
p = tf.nn.softmax(logits)
loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=p)
""",
        right="""\
import tensorflow as tf

logits = model(x)
loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
""",
        check=_activation_first,
        frameworks=_FRAMEWORKS,
    ),
    Rule(
        code="RO912",
        name="keras-from-logits",
        message="the network ends in probabilities and the loss takes them for logits: leave `from_logits=True` or the "
        "activation out",
        why="The activation is applied twice: with three classes the loss cannot fall below 0.55. The reverse takes the "
        "logarithm of negative numbers, clipped.",
        wrong="""\
import tensorflow as tf

model = tf.keras.Sequential([tf.keras.layers.Dense(10, activation="softmax")])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
""",
        right="""\
import tensorflow as tf

model = tf.keras.Sequential([tf.keras.layers.Dense(10)])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
""",
        check=_from_logits,
        frameworks=_FRAMEWORKS,
    ),
)
