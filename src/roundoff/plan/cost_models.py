"""What one call costs in a number format: bytes moved, bit operations, or seconds.

Which parts of a call run in the format is the format's execution rule; the rest
(weight-only formats leave activations alone, int8 leaves the output, matrix formats
leave elementwise work) is counted in the reference format, fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roundoff.errors import PlanError, did_you_mean, nearest
from roundoff.formats import FORMATS, Format
from roundoff.ops import MATRIX_KINDS
from roundoff.plan.seconds import KINDS, SecondsTable

__all__ = ["UNITS", "Work", "cost"]

UNITS: Mapping[str, str] = {
    "bytes": "MB",
    "bitops": "Gbitops",
    "seconds": "ms",
    "operators": "operators",
    "storage": "MB of parameters",
}
PER_UNIT: Mapping[str, float] = {
    "bytes": 1e6,
    "bitops": 1e9,
    "seconds": 1e-3,
    "storage": 1e6,
}
# What "matrix" means in an execution rule.


@dataclass(frozen=True)
class Work:
    """How much one call does in one forward pass, averaged over the batches.

    Attributes:
        kind: linear, matmul, conv, attention, rnn, embedding, elementwise,
            normalization, reduction or softmax.
        macs: multiply-accumulates; 0 for kinds that contract nothing.
        activation_elements: elements read that depend on the input.
        weight_elements: elements of parameters read.
        output_elements: elements written.
    """

    kind: str
    macs: float
    activation_elements: float
    weight_elements: float
    output_elements: float


def cost(
    work: Work,
    fmt: Format,
    model: str,
    *,
    reference: str = "fp32",
    table: SecondsTable | None = None,
) -> float:
    """Cost of one call in a format, in ``UNITS[model]``.

    * "bytes" (MB = 1e6 bytes): operands read and output written once, at the storage
      bits of their formats.
    * "bitops" (Gbitops = 1e9): ``macs * activation bits * weight bits``, the product
      term of the BOPs of Baskin et al. (*UNIQ*, ACM TOCS 37, 2021, arXiv:1804.10969) as
      van Baalen et al. count it (*Bayesian Bits*, NeurIPS 2020, appendix,
      ``BOPs = MACs * b_w * b_a``). Both papers are about integers; here a floating
      point number counts with its storage bits, shared scales included. The second
      operand of a product without weights (matmul, attention) has the activation's
      bits. Work without a contraction counts one addition for each element read or
      written, whichever is more, at one bit operation for each storage bit, as UNIQ
      counts an accumulation; an embedding, which only copies, counts 0.
    * "seconds" (ms): the table's seconds per multiply-accumulate or element, times
      their number.

    * "storage" (MB of parameters = 1e6 bytes): ``weight_elements`` at the storage bits
      of their format (scales of groups and blocks included, those of channels and
      tensors not): what the file of a quantized model holds. A plan counts each
      parameter once, biases too.
    * "operators": 1 for a call that runs in the reference format, else 0: how many
      operators stay in high precision.

    Args:
        work: of the call.
        fmt: the format the call is asked to run in.
        model: "bytes", "bitops", "seconds", "operators" or "storage".
        reference: format of everything that doesn't run in ``fmt``.
        table: for "seconds", from :func:`~roundoff.plan.seconds.read_seconds` or
            :func:`~roundoff.plan.clock.measure_seconds`.

    Returns:
        A number of at least 0; 0 for a call on empty tensors.

    Raises:
        PlanError: unknown model or kind, a format that can't run operators (a scale
            format), or no table or no row of it for "seconds".

    Example:
        >>> linear = Work("linear", 1e6, 1e4, weight_elements=1e6, output_elements=1e4)
        >>> cost(linear, FORMATS["fp32"], "bytes"), cost(linear, FORMATS["int8"], "bytes")
        (4.08, 1.05)
        >>> cost(linear, FORMATS["int8"], "bitops"), cost(linear, FORMATS["int4"], "storage")
        (0.064, 0.5)
    """
    _check(work, fmt, model, table)
    wide = FORMATS[reference]
    runs_in = fmt if _runs(work, fmt) else wide
    if model == "operators":
        return float(runs_in is wide)
    if model == "seconds" and table is not None:
        seconds = table.seconds(work.kind, runs_in.name, _amount(work))
        return seconds / PER_UNIT[model]
    activation, weight, output = _bits(runs_in, wide)
    if model == "storage":
        return work.weight_elements * weight / 8.0 / PER_UNIT[model]
    if model == "bytes":
        bits = (
            work.activation_elements * activation
            + work.weight_elements * weight
            + work.output_elements * output
        )
        return bits / 8.0 / PER_UNIT[model]
    return _bitops(work, activation, weight) / PER_UNIT[model]


def _check(work: Work, fmt: Format, model: str, table: SecondsTable | None) -> None:
    if model not in UNITS:
        raise PlanError(
            "unknown cost model",
            expected=", ".join(UNITS),
            got=repr(model),
            do=did_you_mean(nearest(model, UNITS, at_most=1)),
        )
    if work.kind not in KINDS:
        raise PlanError(
            "unknown kind of work", expected=", ".join(KINDS), got=repr(work.kind)
        )
    if fmt.execution is None:
        raise PlanError(
            "this format runs no operator",
            got=fmt.name,
            do="choose a format for values, not for scales",
        )
    if model == "seconds" and table is None:
        raise PlanError(
            "cost model 'seconds' needs a table of seconds",
            do="measure_seconds(formats), or a file",
        )


def _runs(work: Work, fmt: Format) -> bool:
    """Return True if the format's execution rule covers this kind of work."""
    rule = fmt.execution
    if rule is None:
        return False
    return rule.operators == "all" or work.kind in MATRIX_KINDS


def _amount(work: Work) -> float:
    """Multiply-accumulates where the kind contracts, else elements read or written."""
    if KINDS[work.kind][1] == "mac":
        return work.macs
    return max(work.activation_elements, work.output_elements)


def _bitops(work: Work, activation: float, weight: float) -> float:
    if work.kind == "embedding":
        return 0.0
    amount = _amount(work)
    if KINDS[work.kind][1] != "mac":
        return amount * activation
    second = weight if work.weight_elements > 0.0 else activation
    return amount * activation * second


def _bits(fmt: Format, wide: Format) -> tuple[float, float, float]:
    """Storage bits of the activations, the weights and the output of a call that runs in
    ``fmt``."""
    rule = fmt.execution
    if rule is None:  # the reference is a format for values
        return wide.bits, wide.bits, wide.bits
    return (
        fmt.of_activations.bits if rule.activation is not None else wide.bits,
        fmt.bits if rule.weight is not None else wide.bits,
        fmt.bits if rule.output else wide.bits,
    )
