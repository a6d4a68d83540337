"""What an operator did to make a NaN or Inf of finite inputs, and what to try: rules
over the recorded statistics.

>>> from roundoff.record import TensorRecord
>>> output = TensorRecord(operator="exp", dtype="float32", nan=0, posinf=3, neginf=0)
>>> exponent = TensorRecord(min=0.0, max=103.5, zero=0, numel=8, dtype="float32")
>>> explain_birth(output, [exponent]).cause
'exp of values up to 103.5 passes the largest float32, 3.403e+38'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roundoff.formats import LARGEST
from roundoff.ops import base, facts, operators_that
from roundoff.record import TensorRecord

#: What to try where a gradient has no room in float16.
LOWER_SCALE = (
    "a lower loss scale (torch.amp.GradScaler finds one and skips this step), "
    "or bfloat16"
)


class CauseAndAdvice(NamedTuple):
    """What happened, and what to try."""

    cause: str
    advice: str


@dataclass(frozen=True, slots=True)
class _Birth:
    """An output that isn't finite, and what its inputs held."""

    output: TensorRecord
    operator: str
    #: as it is called in a sentence
    name: str
    #: most finite magnitude of the inputs, 0 where it is not known
    most: float
    has_nan: bool
    has_infinity: bool
    #: what the inputs held
    zeros: bool
    negative: bool
    minus_infinity: bool
    fewest_values: float

    @staticmethod
    def of(output: TensorRecord, inputs: Sequence[TensorRecord]) -> _Birth:
        operator = base(output.operator)
        minima = [row.min for row in inputs if row.min is not None]
        sizes = [row.numel for row in inputs if row.numel is not None]
        return _Birth(
            output=output,
            operator=operator,
            name=operator if _is_cast(operator) else operator.strip("_"),
            most=max(map(_magnitude, inputs), default=0.0),
            has_nan=bool(output.nan),
            has_infinity=bool(output.posinf or output.neginf),
            zeros=any(row.zero for row in inputs),
            negative=min(minima, default=0.0) < 0,
            minus_infinity=any(row.neginf for row in inputs),
            fewest_values=min(sizes, default=math.inf),
        )

    @property
    def largest(self) -> float | None:
        """The largest finite value of the output's dtype."""
        return LARGEST.get(self.output.dtype or "")

    @property
    def limit(self) -> str:
        dtype = self.output.dtype
        if self.largest is None:
            return f"the range of {dtype}"
        return f"the largest {dtype}, {self.largest:.4g}"

    def does(self, trait: str) -> bool:
        """Return True if the operator has a trait in the table of operators."""
        return self.operator in operators_that(trait)


def explain_birth(
    output: TensorRecord, inputs: Sequence[TensorRecord]
) -> CauseAndAdvice:
    """Explain an output that isn't finite by its row and those of its inputs.

    Inputs without statistics count as unknown. The text says only what the numbers
    show; where no rule applies, it says which operator it was.
    """
    birth = _Birth.of(output, inputs)
    for rule in _RULES:
        explanation = rule(birth)
        if explanation is not None:
            return explanation
    kinds = []
    if birth.has_nan:
        kinds.append("NaN")
    if birth.has_infinity:
        kinds.append("Inf")
    return CauseAndAdvice(
        f"{birth.name} made {' and '.join(kinds)} of finite inputs",
        "look at its inputs: roundoff show RUN SITE",
    )


def _masked_row(birth: _Birth) -> CauseAndAdvice | None:
    if not (birth.minus_infinity and birth.has_nan):
        return None
    if birth.does("multiply") or birth.does("multiply two matrices"):
        return CauseAndAdvice(
            f"{birth.name} of -inf, by zero or together with +inf",
            "keep -inf out of what it reads, or leave those elements out with "
            "torch.where before it",
        )
    return CauseAndAdvice(
        "a row that is masked everywhere has nothing left to normalise: "
        "-inf meets -inf",
        "leave one key in each row, or replace those rows with torch.where after the "
        "softmax and before the loss",
    )


def _exponential(birth: _Birth) -> CauseAndAdvice | None:
    if not (birth.does("exponentiate") and birth.has_infinity):
        return None
    return CauseAndAdvice(
        f"{birth.name} of values up to {birth.most:.4g} passes {birth.limit}",
        "subtract the maximum first (logsumexp, softmax)",
    )


def _logarithm(birth: _Birth) -> CauseAndAdvice | None:
    if not birth.does("take logarithms") or not (birth.zeros or birth.negative):
        return None
    operand = "a negative number" if birth.has_nan else "zero"
    return CauseAndAdvice(
        f"{birth.name} of {operand}",
        "log_softmax or logsigmoid instead of log(...), or clamp_min by a small number",
    )


def _gradient_of_a_root(birth: _Birth) -> CauseAndAdvice | None:
    divides = birth.output.phase == "backward" and birth.does("divide in a gradient")
    if not divides or not (birth.zeros or birth.has_nan):
        return None
    return CauseAndAdvice(
        f"{birth.name} in a gradient divides by zero: the derivative of a root or norm "
        "at 0 is infinite",
        "add a small number inside the root, and select with torch.where before the "
        "operator rather than after it",
    )


def _division(birth: _Birth) -> CauseAndAdvice | None:
    if not (birth.does("divide") and birth.zeros):
        return None
    is_zero_by_zero = birth.has_nan and not birth.has_infinity
    division = "0 / 0" if is_zero_by_zero else "division by zero"
    return CauseAndAdvice(
        f"{division} in {birth.name}",
        "add a small number to the divisor, inside a root rather than outside",
    )


def _outside_the_domain(birth: _Birth) -> CauseAndAdvice | None:
    domain = facts(birth.operator).domain
    if domain is None or not birth.has_nan:
        return None
    return CauseAndAdvice(
        f"{birth.name} outside of {domain}",
        "clamp the input into the domain, a little inside its border",
    )


def _moment(birth: _Birth) -> CauseAndAdvice | None:
    is_single = birth.fewest_values <= 1
    if not (birth.does("take moments") and birth.has_nan and is_single):
        return None
    return CauseAndAdvice(
        f"{birth.name} over one element or none",
        "skip empty batches, or use correction=0 for var and std",
    )


def _no_targets(birth: _Birth) -> CauseAndAdvice | None:
    if not (birth.does("average targets") and birth.has_nan):
        return None
    return CauseAndAdvice(
        "a mean over no targets: every one is ignored",
        "skip the batch, or divide by max(count, 1)",
    )


def _cast(birth: _Birth) -> CauseAndAdvice | None:
    largest = birth.largest
    if not _is_cast(birth.operator) or not birth.has_infinity:
        return None
    if largest is None or birth.most <= largest:
        return None
    return CauseAndAdvice(
        f"values up to {birth.most:.4g} were cast to {birth.output.dtype}, which ends "
        f"at {largest:.4g}",
        _smaller_values(birth.output),
    )


def _overflow(birth: _Birth) -> CauseAndAdvice | None:
    is_root_of_zero = birth.zeros and birth.does("take roots")
    if not birth.has_infinity or birth.largest is None or is_root_of_zero:
        return None
    return CauseAndAdvice(
        f"{birth.name} of values up to {birth.most:.4g} passes {birth.limit}",
        _smaller_values(birth.output),
    )


def _root(birth: _Birth) -> CauseAndAdvice | None:
    if not (birth.zeros and birth.does("take roots")):
        return None
    return CauseAndAdvice(f"{birth.name} of zero", "add a small number inside the root")


#: The first that applies is the explanation.
_RULES: tuple[Callable[[_Birth], CauseAndAdvice | None], ...] = (
    _masked_row,
    _exponential,
    _logarithm,
    _gradient_of_a_root,
    _division,
    _outside_the_domain,
    _moment,
    _no_targets,
    _cast,
    _overflow,
    _root,
)


def _is_cast(operator: str) -> bool:
    return operator in operators_that("cast") | operators_that("copy in")


def _smaller_values(row: TensorRecord) -> str:
    if row.dtype in ("float32", "float64"):
        return (
            "scale the values down before this operator: its result has no room in "
            "any usual format"
        )
    if row.phase == "backward" and row.dtype == "float16":
        return LOWER_SCALE
    return "run this operator in bfloat16 or float32, or scale its inputs down"


def _magnitude(row: TensorRecord) -> float:
    """Largest finite magnitude, 0 where it is not known."""
    if row.min is None or row.max is None or not math.isfinite(row.max):
        return 0.0
    return max(abs(row.min), abs(row.max))
