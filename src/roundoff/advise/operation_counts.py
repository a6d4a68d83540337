"""How many operations one kernel call takes: a formula for each kind of work.

A multiply-accumulate (MAC) is two operations (FLOP). Beside the MACs, every element
that an operator computes counts one FLOP, whichever function it is; softmax takes five
(maximum, subtraction, exponential, sum, division), a normalization of rows seven (mean,
difference, square, sum, scale, weight, bias), one by running statistics two. Masked
pairs of causal attention count nothing. What moves values takes none. The formula of
an operator is named in ``ops/table.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

#: FLOPs of one multiply-accumulate.
FLOPS_PER_MAC = 2

#: FLOPs an element: of a softmax and its gradient, of norms and theirs.
SOFTMAX = 5
SOFTMAX_GRADIENT = 4
NORM = 7
ROOT_MEAN_SQUARE_NORM = 4
NORM_BY_STATISTICS = 2
NORM_GRADIENT = 11

#: FLOPs of the gates of one hidden element, by the number of gates: an LSTM's four
#: sums, four functions, three products, a sum and a hyperbolic tangent; a GRU's; a
#: plain layer's sum and function.
GATE_WORK = {4: 13.0, 3: 14.0, 1: 2.0}

#: FLOPs of a parameter in one step of an optimizer.
SGD_STEP = 2
ADAM_STEP = 14
ADAGRAD_STEP = 6


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of a call: multiply-accumulates, and FLOPs that are none."""

    macs: float = 0.0
    other_flops: float = 0.0

    @property
    def flops(self) -> float:
        """All operations, two for each multiply-accumulate."""
        return FLOPS_PER_MAC * self.macs + self.other_flops


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call: its arguments by the names of its schema, and its results."""

    arguments: Mapping[str, Any]
    results: Sequence[Tensor]

    def tensor(self, *names: str) -> Tensor:
        """Return the first argument of these names that is a tensor."""
        for name in names:
            value = self.arguments.get(name)
            if isinstance(value, Tensor):
                return value
        raise KeyError(names[0])

    def has(self, name: str) -> bool:
        """Return True where an argument is there and is not None."""
        return self.arguments.get(name) is not None

    @property
    def operands(self) -> list[Tensor]:
        """All tensors among the arguments, those in lists too."""
        return [tensor for value in self.arguments.values() for tensor in _flat(value)]

    @property
    def elements(self) -> int:
        """Elements of the first result."""
        return self.results[0].numel() if self.results else 0

    @property
    def elements_read(self) -> int:
        """Elements of the first operand."""
        operands = self.operands
        return operands[0].numel() if operands else 0


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def count_work(formula: str, call: KernelCall) -> Work:
    """Return the operations of a call by the formula of that name.

    Raises ``KeyError`` for a name that no formula has, or a missing argument.
    """
    return _FORMULAS[formula](call)


def elementwise(call: KernelCall) -> Work:
    """Return one operation for each element of the results.

    Calls on lists of tensors (``_foreach_``) that write in place have no results: the
    elements of the first list count then.
    """
    if call.results:
        return Work(0, sum(result.numel() for result in call.results))
    first = next(iter(call.arguments.values()), None)
    return Work(0, sum(tensor.numel() for tensor in _flat(first)))


def reduction(call: KernelCall) -> Work:
    """Return one operation for each element that is reduced."""
    return Work(0, call.elements_read)


def _none(_: KernelCall) -> Work:
    return Work()


def _product(call: KernelCall) -> Work:
    left = call.tensor("self", "input")
    return Work(call.elements * left.shape[-1])


def _added_product(call: KernelCall) -> Work:
    left = call.tensor("mat1", "batch1", "mat")
    inner = left.shape[-1]
    batch = left.shape[0] if call.has("batch1") and call.results[0].dim() == 2 else 1
    return Work(call.elements * inner * batch, call.elements)


def _outer_product(call: KernelCall) -> Work:
    return Work(call.elements, call.elements)


def _linear(call: KernelCall) -> Work:
    inner = call.tensor("self", "input").shape[-1]
    bias = call.elements if call.has("bias") else 0
    return Work(call.elements * inner, bias)


def _convolution(call: KernelCall) -> Work:
    bias = call.elements if call.has("bias") else 0
    output = call.results[0]
    return Work(_convolution_macs(call, call.tensor("input", "self"), output), bias)


def _convolution_macs(call: KernelCall, source: Tensor, output: Tensor) -> float:
    """Return output elements times the weights of each, or input elements where the
    convolution is transposed."""
    weight = call.tensor("weight")
    scattered = source if call.arguments.get("transposed") else output
    return scattered.numel() * math.prod(weight.shape[1:])


def _convolution_gradient(call: KernelCall) -> Work:
    gradient = call.tensor("grad_output")
    source = call.tensor("input")
    macs = _convolution_macs(call, source, gradient)
    mask = call.arguments.get("output_mask") or (True, True, False)
    of_input, of_weight, of_bias = mask
    return Work(macs * (of_input + of_weight), gradient.numel() * of_bias)


def _attention(call: KernelCall) -> Work:
    query = call.tensor("query")
    value = call.tensor("value")
    pairs = _pairs(call)
    return Work(pairs * (query.shape[-1] + value.shape[-1]), SOFTMAX * pairs)


def _attention_gradient(call: KernelCall) -> Work:
    """Scores again, then gradients of values, probabilities, queries and keys."""
    query = call.tensor("query")
    value = call.tensor("value")
    pairs = _pairs(call)
    macs = pairs * (3 * query.shape[-1] + 2 * value.shape[-1])
    return Work(macs, (SOFTMAX + SOFTMAX_GRADIENT) * pairs)


def _pairs(call: KernelCall) -> float:
    """Return the pairs of queries and keys that are not masked by ``is_causal``."""
    query = call.tensor("query")
    rows = query.shape[-2]
    columns = call.tensor("key").shape[-2]
    heads = query.numel() // max(1, rows * query.shape[-1])
    if not call.arguments.get("is_causal"):
        return heads * rows * columns
    square = min(rows, columns)
    below = (rows - square) * columns
    return heads * (square * (square + 1) / 2 + below)


def _recurrent(sequence: Tensor, inputs: Tensor, states: Tensor) -> Work:
    """Return the work of one layer in one direction, from its two weights."""
    steps = sequence.numel() / max(1, sequence.shape[-1])
    hidden = states.shape[-1]
    gates = states.shape[0] // max(1, hidden)
    macs = steps * (inputs.numel() + states.numel())
    return Work(macs, steps * hidden * GATE_WORK.get(gates, gates))


def _recurrent_layer(call: KernelCall) -> Work:
    inputs = call.tensor("weight0", "weight1")
    states = call.tensor("weight1", "weight2")
    return _recurrent(call.tensor("input"), inputs, states)


def _recurrent_gradient(call: KernelCall) -> Work:
    forward = _recurrent(
        call.tensor("input"), call.tensor("weight1"), call.tensor("weight2")
    )
    return _twice(forward)


def _stacked_layers(call: KernelCall) -> Work:
    """Every matrix of weights is multiplied once for each step of the sequence."""
    sequence = call.tensor("input")
    steps = sequence.numel() / max(1, sequence.shape[-1])
    matrices = [w for w in _flat(call.arguments.get("weight")) if w.dim() == 2]
    macs = steps * sum(matrix.numel() for matrix in matrices)
    hidden = int(call.arguments.get("hidden_size") or 1)
    gates = matrices[0].shape[0] // hidden if matrices else 1
    layers = len(matrices) / 2
    return Work(macs, steps * layers * hidden * GATE_WORK.get(gates, gates))


def _stacked_gradient(call: KernelCall) -> Work:
    return _twice(_stacked_layers(call))


def _twice(work: Work) -> Work:
    return Work(2 * work.macs, 2 * work.other_flops)


def _recurrent_cell(call: KernelCall) -> Work:
    gates = call.tensor("input_gates")
    is_lstm = call.has("cx")
    number = 4 if is_lstm else 3
    return Work(0, gates.numel() / number * GATE_WORK[number])


def _recurrent_cell_gradient(call: KernelCall) -> Work:
    return Work(0, 2 * call.elements)


def _trilinear(call: KernelCall) -> Work:
    first, second, third = call.operands[:3]
    return Work(max(first.numel(), second.numel(), third.numel()) * 2)


def _norm_of_rows(call: KernelCall) -> Work:
    return Work(0, NORM * call.elements)


def _root_mean_square_norm(call: KernelCall) -> Work:
    return Work(0, ROOT_MEAN_SQUARE_NORM * call.elements)


def _batch_norm(call: KernelCall) -> Work:
    by_batch = call.arguments.get("training", True)
    return Work(0, (NORM if by_batch else NORM_BY_STATISTICS) * call.elements)


def _norm_by_statistics(call: KernelCall) -> Work:
    return Work(0, NORM_BY_STATISTICS * call.elements)


def _norm_gradient(call: KernelCall) -> Work:
    return Work(0, NORM_GRADIENT * call.elements_read)


def _softmax(call: KernelCall) -> Work:
    return Work(0, SOFTMAX * call.elements)


def _softmax_gradient(call: KernelCall) -> Work:
    return Work(0, SOFTMAX_GRADIENT * call.elements)


def _times_read(factor: int) -> Callable[[KernelCall], Work]:
    def formula(call: KernelCall) -> Work:
        return Work(0, factor * call.elements_read)

    return formula


def _times_results(factor: int) -> Callable[[KernelCall], Work]:
    def formula(call: KernelCall) -> Work:
        return Work(0, factor * call.elements)

    return formula


def _times_gradient_or_results(factor: int) -> Callable[[KernelCall], Work]:
    """Gradients of interpolations read as many elements as the forward pass writes."""

    def formula(call: KernelCall) -> Work:
        return Work(0, factor * max(call.elements, _gradient_elements(call)))

    return formula


def _gradient_elements(call: KernelCall) -> int:
    gradient = call.arguments.get("grad_output")
    return gradient.numel() if isinstance(gradient, Tensor) else 0


def _windows(call: KernelCall) -> Work:
    window = call.arguments.get("kernel_size") or 1
    sizes: list[int] = list(window) if isinstance(window, list | tuple) else [window]
    dimensions = call.results[0].dim() - 2
    if len(sizes) == 1:
        sizes *= max(1, dimensions)
    return Work(0, call.elements * math.prod(sizes))


def _fourier(call: KernelCall) -> Work:
    return Work(0, 5 * _points(call) * _log_length(call))


def _real_fourier(call: KernelCall) -> Work:
    return Work(0, 2.5 * _points(call) * _log_length(call))


def _points(call: KernelCall) -> int:
    """Return the points of the transforms, without the half that real ones leave out."""
    return max(call.elements, call.elements_read)


def _log_length(call: KernelCall) -> float:
    longest = call.results[0]
    if call.operands[0].numel() > longest.numel():
        longest = call.operands[0]
    axes = call.arguments.get("dim") or [-1]
    return math.log2(max(1, math.prod(longest.shape[axis] for axis in axes)))


def _distances(call: KernelCall) -> Work:
    width = call.operands[0].shape[-1]
    return Work(0, 3 * call.elements * width)


def _step(factor: int) -> Callable[[KernelCall], Work]:
    def formula(call: KernelCall) -> Work:
        parameters = _flat(call.arguments.get("self"))
        return Work(0, factor * sum(tensor.numel() for tensor in parameters))

    return formula


_FORMULAS: Mapping[str, Callable[[KernelCall], Work]] = {
    "none": _none,
    "product": _product,
    "added product": _added_product,
    "outer product": _outer_product,
    "linear": _linear,
    "convolution": _convolution,
    "convolution's gradient": _convolution_gradient,
    "attention": _attention,
    "attention's gradient": _attention_gradient,
    "recurrent layer": _recurrent_layer,
    "recurrent layer's gradient": _recurrent_gradient,
    "stacked recurrent layers": _stacked_layers,
    "stacked recurrent layers' gradient": _stacked_gradient,
    "recurrent cell": _recurrent_cell,
    "recurrent cell's gradient": _recurrent_cell_gradient,
    "product of three": _trilinear,
    "norm of rows": _norm_of_rows,
    "root mean square norm": _root_mean_square_norm,
    "batch norm": _batch_norm,
    "norm by running statistics": _norm_by_statistics,
    "norm's gradient": _norm_gradient,
    "softmax": _softmax,
    "softmax's gradient": _softmax_gradient,
    "one an element read": _times_read(1),
    "three an element read": _times_read(3),
    "one an element": _times_results(1),
    "two an element": _times_results(2),
    "weight norm": _times_results(4),
    "pooled windows": _windows,
    "interpolation of lines": _times_gradient_or_results(3),
    "interpolation of squares": _times_gradient_or_results(7),
    "interpolation of cubes": _times_gradient_or_results(15),
    "interpolation of 16 points": _times_gradient_or_results(31),
    "Fourier transform": _fourier,
    "real Fourier transform": _real_fourier,
    "distances of pairs": _distances,
    "step of SGD": _step(SGD_STEP),
    "step of Adam": _step(ADAM_STEP),
    "step of Adagrad": _step(ADAGRAD_STEP),
}
