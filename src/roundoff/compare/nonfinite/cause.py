"""What an operator did to make a NaN or Inf of finite inputs, and what to try: rules over the recorded statistics.

>>> row = {"operator": "exp", "phase": "forward", "dtype": "float32", "nan": 0, "posinf": 3, "neginf": 0, "numel": 8}
>>> cause(row, [{"min": 0.0, "max": 103.5, "zero": 0, "numel": 8, "dtype": "float32"}])[0]
'exp of values up to 103.5 passes the largest float32, 3.403e+38'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roundoff.formats import LARGEST
from roundoff.ops import base, facts, operators_that

Row = Mapping[str, Any]

#: What to try where a gradient has no room in float16.
LOWER_SCALE = "a lower loss scale (torch.amp.GradScaler finds one and skips this step), or bfloat16"


def cause(row: Row, inputs: Sequence[Row]) -> tuple[str, str]:
    """(what happened, what to try) for an output that isn't finite, from its row and those of its inputs.

    Inputs without statistics count as unknown. The text says only what the numbers show; where no rule applies, it says
    which operator it was.
    """
    operator = base(row["operator"])
    is_cast = operator in operators_that("cast") | operators_that("copy in")
    name = operator if is_cast else operator.strip("_")
    largest = LARGEST.get(row["dtype"])
    most = max((_magnitude(i) for i in inputs), default=0.0)
    zeros = any(i["zero"] for i in inputs)
    negative = any(i["min"] is not None and i["min"] < 0 for i in inputs)
    infinite, nan = bool(row["posinf"] or row["neginf"]), bool(row["nan"])
    limit = (
        f"the largest {row['dtype']}, {largest:.4g}"
        if largest
        else f"the range of {row['dtype']}"
    )
    if any(i.get("neginf") for i in inputs) and nan:
        return (
            "a row that is masked everywhere has nothing left to normalise: -inf meets -inf",
            "leave one key in each row, or replace those rows with torch.where after the softmax and before the loss",
        )
    if operator in operators_that("exponentiate") and infinite:
        return (
            f"{name} of values up to {most:.4g} passes {limit}",
            "subtract the maximum first (logsumexp, softmax)",
        )
    if operator in operators_that("take logarithms") and (zeros or negative):
        what = "a negative number" if nan else "zero"
        return (
            f"{name} of {what}",
            "log_softmax or logsigmoid instead of log(...), or clamp_min by a small number",
        )
    if (
        row["phase"] == "backward"
        and operator in operators_that("divide in a gradient")
        and (zeros or nan)
    ):
        return (
            f"{name} in a gradient divides by zero: the derivative of a root or norm at 0 is infinite",
            "add a small number inside the root, and select with torch.where before the operator rather than after it",
        )
    if operator in operators_that("divide") and zeros:
        what = "0 / 0" if nan and not infinite else "division by zero"
        return (
            f"{what} in {name}",
            "add a small number to the divisor, inside a root rather than outside",
        )
    domain = facts(operator).domain
    if domain is not None and nan:
        return (
            f"{name} outside of {domain}",
            "clamp the input into the domain, a little inside its border",
        )
    if (
        operator in operators_that("take moments")
        and nan
        and any(i["numel"] <= 1 for i in inputs)
    ):
        return (
            f"{name} over one element or none",
            "skip empty batches, or use correction=0 for var and std",
        )
    if operator in operators_that("average targets") and nan:
        return (
            "a mean over no targets: every one is ignored",
            "skip the batch, or divide by max(count, 1)",
        )
    if is_cast and infinite and largest is not None and most > largest:
        return (
            f"values up to {most:.4g} were cast to {row['dtype']}, which ends at {largest:.4g}",
            _smaller(row),
        )
    if (
        infinite
        and largest is not None
        and not (zeros and operator in operators_that("take roots"))
    ):
        return f"{name} of values up to {most:.4g} passes {limit}", _smaller(row)
    if zeros and operator in operators_that("take roots"):
        return f"{name} of zero", "add a small number inside the root"
    kinds = [kind for kind, there in (("NaN", nan), ("Inf", infinite)) if there]
    return (
        f"{name} made {' and '.join(kinds)} of finite inputs",
        "look at its inputs: roundoff show RUN SITE",
    )


def _smaller(row: Row) -> str:
    if row["dtype"] in ("float32", "float64"):
        return "scale the values down before this operator: its result has no room in any usual format"
    if row["phase"] == "backward" and row["dtype"] == "float16":
        return LOWER_SCALE
    return "run this operator in bfloat16 or float32, or scale its inputs down"


def _magnitude(row: Row) -> float:
    """Largest finite magnitude, 0 where it is not known."""
    if row["min"] is None or row["max"] is None:
        return 0.0
    return (
        max(abs(float(row["min"])), abs(float(row["max"])), 0.0)
        if math.isfinite(row["max"])
        else 0.0
    )
