"""Recurrent layers of torch as nodes LSTM, GRU and RNN of ONNX, not as unrolled steps.

While a forward pass is traced, ``KeepRecurrent`` calls one operator a layer where the model
calls ``_VF.lstm`` and its like. The exporter writes that as a node of this package's own,
which ``lower_recurrent`` turns into ONNX's: gates in its order, weights of all directions
stacked, codes of weights dequantized by Cast and Mul, which ONNX Runtime computes once,
when it loads the file (a DequantizeLinear it runs in every call: 0.6 to 0.95 of the speed).

Gates lie in the rows of a weight: those of torch's LSTM as input, forget, cell, output,
those of ONNX's as input, output, forget, cell; of GRU as reset, update, new and as update,
reset, new. torch's GRU multiplies by the reset gate behind the product, which ONNX calls
``linear_before_reset``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.export.onnx.projected import projected_layer

_CHECK = "check_forward_args"


@dataclass(frozen=True, slots=True)
class RecurrentKind:
    """One kind of recurrent layer.

    Attributes:
        operator: of ONNX.
        gates: the place in torch's weight of each gate, in ONNX's order.
        has_cell: it has a cell state beside the hidden one.
        attributes: of ONNX's operator, beside its size and direction.
        activation: of ONNX's operator, where it is not its default.
    """

    operator: str
    gates: tuple[int, ...]
    has_cell: bool = False
    attributes: tuple[tuple[str, int], ...] = ()
    activation: str = ""


#: By name; an RNN comes with two activations.
KINDS = {
    "LSTM": RecurrentKind("LSTM", (0, 3, 1, 2), has_cell=True),
    "GRU": RecurrentKind("GRU", (1, 0, 2), attributes=(("linear_before_reset", 1),)),
    "RNN": RecurrentKind("RNN", (0,)),
    "RNN of Relu": RecurrentKind("RNN", (0,), activation="Relu"),
}


@torch.library.custom_op("roundoff::recurrent_layer", mutates_args=())
def recurrent_layer(
    x: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    lengths: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor],
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one or both directions, as torch computes it.

    Args:
        x: [time, batch, features].
        hidden: [directions, batch, size] before the first step.
        cell: the same of an LSTM; None for others.
        lengths: [batch], of each sequence; None where all are as long as ``x``.
        weights: of each direction the two of torch.
        biases: likewise, or empty.
        kind: key of ``KINDS``.

    Returns:
        [time, batch, directions * size], and both states after the last step; the cell's
        is empty where there is none.
    """
    states = (hidden, cell) if KINDS[kind].has_cell else hidden
    function = _FUNCTIONS[kind]
    parameters = _in_torchs_order(weights, biases)
    bidirectional = len(weights) == 4
    if lengths is None:
        settings = (bool(biases), 1, 0.0, False, bidirectional, False)
        result = function(x, states, parameters, *settings)
    else:
        result = _run_packed(function, x, states, lengths, parameters, bool(biases))
    output, last, *cells = result
    return output.clone(), last.clone(), (cells[0] if cells else x.new_empty(0)).clone()


@recurrent_layer.register_fake
def _(
    x: Tensor, hidden: Tensor, cell: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    directions, samples, size = hidden.shape
    output = x.new_empty(x.shape[0], samples, directions * size)
    after = x.new_empty(0) if cell is None else torch.empty_like(cell)
    return output, torch.empty_like(hidden), after


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN": torch.rnn_tanh,
    "RNN of Relu": torch.rnn_relu,
}


def _in_torchs_order(
    weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    """Return weights and biases of each direction after each other."""
    parameters: list[Tensor] = []
    for place in range(0, len(weights), 2):
        parameters += [*weights[place : place + 2], *biases[place : place + 2]]
    return parameters


def _run_packed(
    function: Callable[..., Any],
    x: Tensor,
    states: Any,
    lengths: Tensor,
    parameters: list[Tensor],
    has_biases: bool,
) -> tuple[Tensor, ...]:
    """Run a layer on sequences of these lengths; what lies behind them is 0."""
    data, sizes = torch._VF._pack_padded_sequence(x, lengths, False)
    per_direction = 4 if has_biases else 2
    bidirectional = len(parameters) > per_direction
    settings = (has_biases, 1, 0.0, False, bidirectional)
    output, *last = function(data, sizes, states, parameters, *settings)
    padded, _ = torch._VF._pad_packed_sequence(output, sizes, False, 0.0, x.shape[0])
    return padded, *last


class KeepRecurrent(TorchFunctionMode):
    """Call ``recurrent_layer`` in the place of torch's recurrent operators.

    Packed sequences are passed on padded: their data are [time * batch, features] then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._samples: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the layers of one forward pass, which runs inside the block.

        The checks of ``nn.LSTM`` and its like are off: they would fix the number of
        packed sequences.
        """
        checks = nn.RNNBase.check_forward_args, nn.LSTM.check_forward_args
        setattr(nn.RNNBase, _CHECK, _unchecked)
        setattr(nn.LSTM, _CHECK, _unchecked)
        try:
            with self:
                yield
        finally:
            setattr(nn.RNNBase, _CHECK, checks[0])
            setattr(nn.LSTM, _CHECK, checks[1])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kind = _KIND_OF.get(func)
        if kind is not None:
            return self._layers(kind, func, args)
        if func is torch._VF._pack_padded_sequence:
            return self._pack(*args)
        if func is torch._VF._pad_packed_sequence:
            return self._unpack(func, args)
        if func is torch.zeros:
            args = [self._number(arg) for arg in args]
        result = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and args[0] in self._packed and args[1] == 0:
            self._samples[result] = self._packed[args[0]][2]
        return result

    def _number(self, value: Any) -> Any:
        """Return the number of packed sequences for a tensor that holds it."""
        if not isinstance(value, Tensor):
            return value
        samples: Any = self._samples
        return samples.get(value, value)

    def _pack(
        self, x: Tensor, lengths: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        """Return padded data, and the number of sequences that reach each step."""
        by_time = x.transpose(0, 1) if batch_first else x
        steps = torch.arange(by_time.shape[0], device=lengths.device)
        sizes = (lengths[None, :] > steps[:, None]).sum(1)
        self._packed[sizes] = lengths, by_time.shape[0], by_time.shape[1]
        return by_time.reshape(-1, *by_time.shape[2:]), sizes

    def _unpack(self, func: Callable[..., Any], args: Any) -> Any:
        data, sizes, batch_first, padding, *_ = args
        if sizes not in self._packed:
            return func(*args)
        lengths, steps, samples = self._packed[sizes]
        padded = data.reshape(steps, samples, *data.shape[1:])
        longest = lengths.max().item()
        check: Callable[[bool], None] = torch._check
        check(longest >= 0)
        check(longest <= steps)
        padded = padded[:longest]
        if padding != 0:
            reached = torch.arange(longest)[:, None] < lengths[None, :]
            while reached.ndim < padded.ndim:
                reached = reached[..., None]
            padded = torch.where(reached, padded, padding)
        return (padded.transpose(0, 1) if batch_first else padded), lengths

    def _layers(self, kind: str, func: Callable[..., Any], args: Any) -> Any:
        """Run all layers of one call, or leave it to torch."""
        packed = isinstance(args[1], Tensor) and isinstance(args[3], list | tuple)
        if packed and args[1] not in self._packed:
            return func(*args)
        call = _Call.of(kind, args, self._packed[args[1]] if packed else None)
        if call.is_supported():
            return call.run()
        if call.is_projected():
            return call.run(projected_layer)
        return func(*args)


def _unchecked(*_: Any) -> None:
    """Check nothing."""


_KIND_OF = {function: kind for kind, function in _FUNCTIONS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a recurrent operator of torch.

    Attributes:
        kind: key of ``KINDS``.
        x: [time, batch, features], or the other way with ``batch_first``; packed
            [time * batch, features].
        states: hidden, and cell: [layers * directions, batch, size].
        weights: all parameters, in torch's order.
        packed: lengths, steps and samples of packed sequences.
    """

    kind: str
    x: Tensor
    states: tuple[Tensor, ...]
    parameters: Sequence[Tensor]
    has_biases: bool
    layers: int
    drops: bool
    bidirectional: bool
    batch_first: bool
    packed: tuple[Tensor, int, int] | None

    @classmethod
    def of(cls, kind: str, args: Any, packed: tuple[Tensor, int, int] | None) -> _Call:
        x, *rest = args
        if packed is not None:
            rest = rest[1:]
        states, parameters, has_biases, layers, dropout, training, bidirectional = rest[
            :7
        ]
        return cls(
            kind=kind,
            x=x,
            states=tuple(states) if KINDS[kind].has_cell else (states,),
            parameters=parameters,
            has_biases=has_biases,
            layers=layers,
            drops=bool(training and dropout),
            bidirectional=bidirectional,
            batch_first=bool(rest[7]) if packed is None else False,
            packed=packed,
        )

    def is_supported(self) -> bool:
        """Return False for dropout, and for an LSTM with projections, which ONNX's has not."""
        floats = {t.dtype for t in (self.x, *self.states)} == {torch.float32}
        return not self.drops and not self.is_projected() and floats

    def is_projected(self) -> bool:
        """Return True for an LSTM whose hidden state is smaller than its cell's."""
        return any(s.shape[-1] != self.states[0].shape[-1] for s in self.states)

    def run(
        self, run_layer: Callable[..., Any] = recurrent_layer
    ) -> tuple[Tensor, ...]:
        """Return output and last states as torch does."""
        value = self._by_time()
        lengths = None if self.packed is None else self.packed[0]
        directions = 2 if self.bidirectional else 1
        count = len(self.parameters) // self.layers
        last: list[list[Tensor]] = [[] for _ in self.states]
        for layer in range(self.layers):
            span = slice(layer * directions, (layer + 1) * directions)
            weights, biases = self._parameters_of(
                self.parameters[layer * count : (layer + 1) * count]
            )
            hidden, *cell = (state[span] for state in self.states)
            value, *after = run_layer(
                value,
                hidden,
                cell[0] if cell else None,
                lengths,
                weights,
                biases,
                self.kind,
            )
            for kept, state in zip(last, after, strict=False):
                kept.append(state)
        if self.packed is not None:
            value = value.reshape(-1, value.shape[2])
        elif self.batch_first:
            value = value.transpose(0, 1)
        return value, *(torch.cat(states) for states in last)

    def _by_time(self) -> Tensor:
        if self.packed is not None:
            _, steps, samples = self.packed
            return self.x.reshape(steps, samples, -1)
        return self.x.transpose(0, 1) if self.batch_first else self.x

    def _parameters_of(
        self, parameters: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return weights and biases of one layer, directions after each other."""
        matrices = 3 if self.is_projected() else 2
        step = matrices + (2 if self.has_biases else 0)
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for start in range(0, len(parameters), step):
            group = parameters[start : start + step]
            weights += [tensor for tensor in group if tensor.ndim == 2]
            biases += [tensor for tensor in group if tensor.ndim == 1]
        return weights, biases
