"""Bytes of a quantized model, and the work of its formats relative to fp32."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from roundoff.formats import parse_format
from roundoff.quantize import QuantizedModel, Quantizer

#: Bytes of a scale beside codes.
SCALE_BYTES = 4


def stored_bytes(model: QuantizedModel) -> int:
    """Return the bytes of parameters and buffers; shared ones count once.

    Weights with a quantizer count in its format with their scales, the rest as it is.
    """
    quantizers = {name: q for name, q in model.named() if q.weight}
    tensors = {
        **dict(model.model.named_parameters()),
        **dict(model.model.named_buffers()),
    }
    return round(
        sum(
            _tensor_bytes(tensor, quantizers.get(name))
            for name, tensor in tensors.items()
        )
    )


def _tensor_bytes(tensor: Tensor, quantizer: Quantizer | None) -> float:
    if quantizer is None:
        return tensor.numel() * tensor.element_size()
    scales = 0 if quantizer.scale is None else quantizer.scale.numel()
    return tensor.numel() * quantizer.fmt.bits / 8 + SCALE_BYTES * scales


def work(formats: Mapping[str, str], macs: Mapping[str, int]) -> float | None:
    """Return the bit operations of the products relative to all in fp32.

    These are multiply-accumulates times the bits of both operands; the second operand of
    a product without weights counts like a weight. None where nothing multiplies.

    >>> work({"a": "w4a8"}, {"a": 30, "b": 10})
    0.2734375
    """
    total = sum(macs.values())
    if not total:
        return None
    done = sum(
        number * _bits_a_product(formats.get(site, "fp32"))
        for site, number in macs.items()
    )
    return done / (total * 32.0 * 32.0)


def _bits_a_product(name: str) -> float:
    fmt = parse_format(name)
    rule = fmt.execution
    keeps_values = rule is not None and rule.activation is None
    keeps_weights = rule is not None and rule.weight is None
    value_bits = 32.0 if keeps_values else fmt.of_activations.bits
    weight_bits = 32.0 if keeps_weights else fmt.bits
    return value_bits * weight_bits
