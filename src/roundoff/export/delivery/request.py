"""Ask: what a user wants of a quantized model, checked before anything is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from roundoff.budget import SqnrTarget, TargetText, is_drop, parse_drop, parse_target
from roundoff.errors import FormatError, QuantizationError
from roundoff.formats import parse_format
from roundoff.plan import UNITS, Plan
from roundoff.quantize import OBSERVERS, Options, Rounding, check_choice
from roundoff.workload import Workload

#: Samples that are calibrated on by default.
SAMPLES = 512
#: ``--method`` -> how channels are balanced first, how weights are rounded then.
#: AWQ and SmoothQuant as published.
METHODS = {
    "gptq": ("", "gptq"),
    "nearest": ("", "nearest"),
    "awq": ("awq", "nearest"),
    "awq+gptq": ("awq", "gptq"),
    "smoothquant": ("smoothquant", "nearest"),
    "smoothquant+gptq": ("smoothquant", "gptq"),
    "dmq": ("dmq", "nearest"),
    "dmq+gptq": ("dmq", "gptq"),
}
_N_OF_M = re.compile(r"(?P<n>\d+):(?P<m>\d+)")
_SHARE = re.compile(r"(?P<kind>channel|magnitude):(?P<share>\d*\.?\d+)")


class QualityTarget(NamedTuple):
    """A target: at most so much less of the metric (``drop``), or at least so many ``db``.

    ``value`` is the one number of it, None where each output has its own; ``sqnr`` is
    that of each output, None for a drop.
    """

    kind: Literal["drop", "db"]
    value: float | None
    text: str
    sqnr: SqnrTarget | None = None


class Prune(NamedTuple):
    """``2:4`` (n of m weights stay), ``channel:0.3`` or ``magnitude:0.5`` (that share goes)."""

    kind: Literal["n_m", "channel", "magnitude"]
    n: int
    m: int
    share: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What to make of a workload's model.

    Attributes:
        formats: formats that may be used; one is taken for all products with weights,
            several need a target.
        target: ``0.5%`` of the metric less at most, or ``38dB`` of every output at least,
            or of each by name: ``cls=40dB,price=30dB``, or a mapping.
        of: a part of the output, by name, that the model is judged by; None for all of
            it but numbers beside larger tensors.
        plan: instead of both, which site runs in which format.
        skip: patterns of sites that stay in fp32.
        pin: pattern of sites -> the format they run in.
        cost: what a target's plan saves (see ``plan.cost``).
        options, rounding: see ``roundoff.quantize``.
        samples: calibration data, from the first batches on; None: ``SAMPLES``.
        batches: instead, so many batches.
        fold: fold BatchNorm first.
        prune: ``2:4``, ``channel:0.3`` or ``magnitude:0.5``; before quantization, which
            is then calibrated on what is left.
        qat: train with quantization afterwards.
        epochs: epochs of that training, and of the training after pruning.
        lr: learning rate of AdamW.
        distill: the fp32 model is the teacher.
        tradeoff: also measure the same model in each usual format alone.
        notes: notes for the report.

    Raises:
        QuantizationError, FormatError: these do not go together, or one of them is
            unknown; the message says which.
    """

    formats: tuple[str, ...] = ("int8",)
    target: TargetText | None = None
    of: str | None = None
    plan: Plan | None = None
    skip: tuple[str, ...] = ()
    pin: Mapping[str, str] = field(default_factory=dict)
    cost: str = "bitops"
    options: Options = field(default_factory=Options)
    rounding: Rounding = field(default_factory=Rounding)
    samples: int | None = None
    batches: int | None = None
    fold: bool = True
    prune: str = ""
    qat: bool = False
    epochs: int = 0
    lr: float = 1e-4
    distill: bool = False
    tradeoff: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (*self.formats, *self.pin.values()):
            parse_format(name)
        # seconds are no cost here: integer kernels are not in their tables
        check_choice("--cost", self.cost, [name for name in UNITS if name != "seconds"])
        self._check_plan()
        self._check_training()
        _ = self.goal, self.pruning  # these raise

    def _check_plan(self) -> None:
        if self.plan is None:
            self._check_formats()
        elif self.target is not None:
            raise QuantizationError(
                "a target chooses a plan itself",
                where="--target",
                got="a plan too",
                do="leave one of them out",
            )
        elif self.plan.autocast:
            self.plan.format_of("")  # says why not

    def _check_formats(self) -> None:
        if not self.formats:
            raise QuantizationError(
                "no format to quantize to",
                where="--formats",
                expected="one, such as int8",
            )
        if self.target is None and len(self.formats) > 1:
            raise QuantizationError(
                "which site runs in which of these formats?",
                where="--formats",
                got=", ".join(self.formats),
                expected="one format, or a target or a plan that decides",
                do="add --target 0.5% or --target 38dB",
            )

    def _check_training(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise QuantizationError(
                "no calibration data",
                where="--samples",
                expected="one or more",
                got=str(self.samples),
            )
        if (self.qat or self.distill) and self.epochs < 1:
            raise QuantizationError(
                "training needs a number of epochs",
                where="--epochs",
                expected="1 or more",
                got=str(self.epochs),
            )
        if self.epochs and not (self.qat or self.prune):
            raise QuantizationError(
                "nothing would be trained",
                where="--epochs",
                expected="--qat or --prune beside it",
            )

    @property
    def goal(self) -> QualityTarget | None:
        """The target, parsed."""
        return None if self.target is None else parse_goal(self.target)

    @property
    def pruning(self) -> Prune | None:
        """What to prune, parsed."""
        return parse_prune(self.prune) if self.prune else None


def check_workload(workload: Workload, ask: Ask) -> None:
    """Raise ``QuantizationError`` unless the workload has what the request needs."""
    goal = ask.goal
    if goal is not None and goal.kind == "drop" and workload.metric is None:
        raise QuantizationError(
            "a target in the metric needs one",
            where=workload.name,
            got=goal.text,
            expected="a metric in the workload, or decibels such as 38dB",
        )
    if ask.epochs and workload.loss is None and not ask.distill:
        raise QuantizationError(
            "training needs a loss",
            where=workload.name,
            expected="loss(output, batch) in the workload",
            do="define it, or learn from the fp32 model: --distill",
        )


def parse_goal(target: TargetText) -> QualityTarget:
    """Parse a target; decibels may stand without their unit, as in ``roundoff.plan``.

    >>> parse_goal("0.5%")[:3], parse_goal("38 dB").value, parse_goal("38").text
    (('drop', 0.005, '0.5%'), 38.0, '38dB')
    >>> parse_goal("cls=40dB,price=30dB").sqnr.of_output("price")
    30.0
    """
    if is_drop(target):
        return QualityTarget("drop", parse_drop(str(target)), str(target))
    sqnr = parse_target(target)
    has_unit = isinstance(target, str) and "db" in target.lower()
    text = str(target) if has_unit else str(sqnr)
    return QualityTarget("db", sqnr.db, text, sqnr)


def parse_prune(text: str) -> Prune:
    """Parse what to prune.

    >>> parse_prune("2:4").kind, parse_prune("channel:0.3").share
    ('n_m', 0.3)
    """
    n_of_m = _N_OF_M.fullmatch(text)
    if n_of_m is not None and 0 < int(n_of_m["n"]) < int(n_of_m["m"]):
        return Prune("n_m", int(n_of_m["n"]), int(n_of_m["m"]), 0.0, text)
    removed = _SHARE.fullmatch(text)
    if removed is not None and 0 < float(removed["share"]) < 1:
        kind: Literal["channel", "magnitude"] = (
            "channel" if removed["kind"] == "channel" else "magnitude"
        )
        return Prune(kind, 0, 0, float(removed["share"]), text)
    raise QuantizationError(
        "not a way to prune",
        where="--prune",
        got=repr(text),
        expected="2:4, channel:0.3 or magnitude:0.5 (the share that goes, below 1)",
    )


def weights_only(name: str, group: int | None) -> str:
    """Name the format that keeps weights alone in another one.

    >>> weights_only("int4", 64), weights_only("int8", None)
    ('w4g64', 'w8')
    """
    fmt = parse_format(name)
    if fmt.one_quantum != 1.0 or not fmt.symmetric:
        raise FormatError(
            "weights alone are integers",
            where="--weights-only",
            expected="int4, int8 or another width",
            got=name,
        )
    groups = f"g{group}" if group else ""
    return parse_format(f"w{fmt.width}{groups}").name


def rounding(observer: str, method: str) -> Rounding:
    """Return what ``--observer`` and ``--method`` name.

    >>> rounding("mse", "awq+gptq").balance, rounding("mse", "awq").weights
    ('awq', 'nearest')
    """
    check_choice("--observer", observer, OBSERVERS)
    check_choice("--method", method, METHODS)
    balance, weights = METHODS[method]
    return Rounding(observer=observer, weights=weights, balance=balance)


def asked_formats(
    formats: Sequence[str], only: str | None, group: int | None
) -> tuple[str, ...]:
    """Return the formats of ``--formats``, or that of ``--weights-only`` and ``--group``."""
    if only is not None:
        return (weights_only(only, group),)
    if group is not None:
        raise QuantizationError(
            "groups of weights are for weights alone",
            where="--group",
            got=str(group),
            do="add --weights-only int4, or name the format: --formats w4a8g64",
        )
    return tuple(formats)
