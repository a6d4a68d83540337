"""storage: bytes of a quantized model, and the work of a format relative to fp32."""

from __future__ import annotations

from collections.abc import Mapping

from roundoff.formats import parse_format
from roundoff.quantize import QuantizedModel

#: Bytes of a scale beside codes.
SCALE = 4


def stored_bytes(model: QuantizedModel) -> int:
    """Bytes of parameters and buffers: weights that have a quantizer in its format with their scales, the rest as it is.

    Shared parameters count once.
    """
    quantized = {name: q for name, q in model.named() if q.weight}
    total, seen = 0.0, set()
    for name, tensor in (*model.model.named_parameters(), *model.model.named_buffers()):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        quantizer = quantized.get(name)
        if quantizer is None:
            total += tensor.numel() * tensor.element_size()
            continue
        total += tensor.numel() * quantizer.fmt.bits / 8
        total += SCALE * (quantizer.scale.numel() if quantizer.scale is not None else 0)
    return round(total)


def work(formats: Mapping[str, str], macs: Mapping[str, int]) -> float | None:
    """Bit operations of the products (multiply-accumulates times the bits of both operands) relative to all in fp32.

    The second operand of a product without weights counts like a weight. None where nothing multiplies.

    >>> work({"a": "w4a8"}, {"a": 30, "b": 10})
    0.2734375
    """
    total = sum(macs.values())
    if not total:
        return None
    done = 0.0
    for site, number in macs.items():
        fmt = parse_format(formats.get(site, "fp32"))
        rule = fmt.execution
        values = (
            fmt.of_activations.bits
            if rule is None or rule.activation is not None
            else 32.0
        )
        done += (
            number
            * values
            * (fmt.bits if rule is None or rule.weight is not None else 32.0)
        )
    return done / (total * 32.0 * 32.0)
