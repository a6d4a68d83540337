"""Losses and activations in TensorFlow: logits where logits are expected."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.contexts import text_of
from roundoff.lint.rule import Hit, Rule
from roundoff.lint.script import Script

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
        logits = next(
            (each.value for each in call.keywords if each.arg == "logits"),
            call.args[1] if len(call.args) > 1 else None,
        )
        value = logits
        if isinstance(logits, ast.Name):
            value = script.definition(logits)
        if isinstance(value, ast.Call) and _name(script, value) in activations:
            yield Hit(call)


def _from_logits(script: Script) -> Iterator[Hit]:
    """A loss of Keras that expects logits of a network that ends in probabilities."""
    for call in script.nodes(ast.Call):
        name = _name(script, call)
        activation = _KERAS_LOSSES.get(name.rpartition(".")[2])
        if activation is None or not name.startswith("keras.losses."):
            continue
        expects = next(
            (each.value for each in call.keywords if each.arg == "from_logits"), None
        )
        takes_logits = isinstance(expects, ast.Constant) and expects.value is True
        if takes_logits and _ends_in(script, activation):
            yield Hit(call)
        elif expects is None and _ends_in(script, None):
            yield Hit(call, _MISSING)


_MISSING = (
    "the network ends in logits and the loss takes them for probabilities: pass "
    "`from_logits=True`"
)


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
    value = next(
        (each.value for each in layer.keywords if each.arg == "activation"),
        layer.args[1] if len(layer.args) > 1 else None,
    )
    if value is None:
        return None
    named = (script.qualified(value) or "").rpartition(".")[2]
    return text_of(script, value) or named or "unknown"


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
