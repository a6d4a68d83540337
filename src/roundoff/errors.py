"""The errors that roundoff raises on purpose, and the words that they share.

Each says where, what was expected, what came, and what to do. Catch
:class:`RoundoffError` for all of them. Anything else that escapes is a bug in roundoff
or in torch.
"""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Sequence

__all__ = [
    "ArgumentError",
    "FormatError",
    "GradientPathError",
    "InfeasibleError",
    "NonFiniteError",
    "OptimizerError",
    "OutputError",
    "PatternError",
    "PlanError",
    "QuantizationError",
    "RoundoffError",
    "RunError",
    "ScalerError",
    "StuckError",
    "WorkloadError",
]


class RoundoffError(Exception):
    """Base class of all roundoff errors.

    The message has one line for the fault and one for each part that is given; a part
    left out or ``None`` has no line. Every part is kept as an attribute of the same
    name, so a caller can branch on it without reading English.

    Args:
        what: the fault, one sentence without a full stop.
        where: the place: a file and line, a site, a field of a file.
        expected: what would have been accepted.
        got: what came instead. Describe tensors by shape and dtype, never by content.
        do: the next step for the user.

    Example:
        >>> print(RoundoffError("unknown format", where="--formats", got="bf61", do="use bf16"))
        --formats: unknown format
          got: bf61
          do: use bf16
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        do: str | None = None,
    ) -> None:
        lines = [what if where is None else f"{where}: {what}"]
        for label, text in (("expected", expected), ("got", got), ("do", do)):
            if text is not None:
                lines.append(f"  {label}: {text}")
        super().__init__("\n".join(lines))
        self.what = what
        self.where = where
        self.expected = expected
        self.got = got
        self.do = do

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own __reduce__ would pass the drawn message as `what` again and
        # lose the keyword-only parts; errors cross process boundaries (pytest-xdist,
        # multiprocessing), so rebuild from the attributes instead.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    cls: type[RoundoffError], args: tuple[object, ...], state: dict[str, object]
) -> RoundoffError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ArgumentError(RoundoffError, TypeError):
    """An argument of a function is of a type that it does not take."""


def wrong_type(
    name: str, value: object, expected: str, do: str | None = None
) -> ArgumentError:
    """Return the error for an argument of a wrong type, to be raised by the caller.

    >>> print(wrong_type("run", None, "a folder"))
    run: an argument of the wrong type
      expected: a folder
      got: None
    """
    got = f"a {type(value).__name__}"
    if isinstance(value, type):
        got = f"the class {value.__name__}"
    return ArgumentError(
        "an argument of the wrong type",
        where=name,
        expected=expected,
        got="None" if value is None else got,
        do=do,
    )


class WorkloadError(RoundoffError):
    """The user's workload cannot be loaded, run or evaluated as written."""


class FormatError(RoundoffError):
    """A number format is unknown, or cannot do what was asked of it."""


class PatternError(RoundoffError):
    """A site pattern matches nothing, or is not a valid pattern."""


class PlanError(RoundoffError):
    """A plan is malformed, or does not fit the model it is applied to."""


class InfeasibleError(PlanError):
    """No plan meets the target.

    Attributes:
        best_db: SQNR of the best plan there is, in dB (20 log10 of norm ratio). ``inf``
            if it has no error at all.
        short_db: by how many dB it misses the target; ``inf`` where that is not known.
        pinned: the sites whose format the user fixed, as strings; empty if none.

    Example:
        >>> error = InfeasibleError("no plan reaches 90 dB", best_db=71.5, pinned=["head/linear"])
        >>> error.best_db, error.pinned
        (71.5, ['head/linear'])
    """

    def __init__(
        self,
        what: str,
        *,
        best_db: float,
        short_db: float = math.inf,
        pinned: Sequence[str] = (),
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        do: str | None = None,
    ) -> None:
        super().__init__(what, where=where, expected=expected, got=got, do=do)
        self.best_db = best_db
        self.short_db = short_db
        self.pinned = list(pinned)


class OutputError(RoundoffError):
    """The output folder or one of its files cannot be written, or would be overwritten."""


class QuantizationError(RoundoffError):
    """A model, a tensor or a record cannot be quantized, pruned or exported as asked.

    The model is as before.
    """


class RunError(RoundoffError):
    """A recorded run cannot be read.

    It is none, is from a later version or damaged, or lacks what was asked for.
    """


class GradientPathError(WorkloadError):
    """No gradient reaches what has to be attributed: detached, integer, or under no_grad."""


class NonFiniteError(WorkloadError):
    """A NaN or Inf appeared where the method needs finite numbers."""


class OptimizerError(RoundoffError):
    """An optimizer cannot be used as asked."""


class ScalerError(RoundoffError):
    """A loss scaler was used in a wrong order, or on what it cannot scale.

    Weights, gradients and scale are as before.
    """


class ScriptError(RoundoffError):
    """A script cannot be read, or not migrated as asked; it is as it was."""


class StuckError(NonFiniteError):
    """Step after step was skipped although the loss scale cannot help any more.

    The weights are those of before.
    """


def warn(text: str) -> None:
    """Warn with a ``RuntimeWarning``; where the user has made warnings errors, with a
    line on stderr.
    """
    try:
        # at the caller of what stopped: of a run's writer, its caller
        warnings.warn(text, RuntimeWarning, stacklevel=5)
    except Warning:
        sys.stderr.write(f"RuntimeWarning: {text}\n")


def nearest(
    name: str, names: Iterable[str], *, at_most: int = 3, likeness: float = 0.5
) -> list[str]:
    """Return the names spelled most like ``name``, best first; upper and lower case are alike.

    Args:
        name: what the user wrote.
        names: the names that there are.
        at_most: how many to return.
        likeness: the least ratio of matching letters, 0 to 1 (``difflib``).

    >>> nearest("Matmull", ["MatMul", "Softmax"])
    ['MatMul']
    """
    spellings: dict[str, list[str]] = {}
    for each in names:
        spellings.setdefault(each.casefold(), []).append(each)
    near = difflib.get_close_matches(
        str(name).casefold(), spellings, n=at_most, cutoff=likeness
    )
    return [each for folded in near for each in spellings[folded]][:at_most]


def did_you_mean(near: Iterable[str]) -> str | None:
    """Return the question for the ``do`` part of an error; None where no name is near.

    >>> did_you_mean(nearest("bf61", ["bf16", "fp8"]))
    'did you mean bf16?'
    """
    choices = " or ".join(near)
    return f"did you mean {choices}?" if choices else None


def examples(name: str, names: Iterable[str]) -> str:
    """Return three names for "such as ...": the nearest to ``name``, else the first that there are.

    >>> examples("qqq", ["", "body", "head"])
    'body, head'
    """
    choices = [each for each in names if each]
    return ", ".join(nearest(name, choices, likeness=0.3) or choices[:3])
