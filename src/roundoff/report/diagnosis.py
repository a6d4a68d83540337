"""What ``roundoff diagnose`` finds, as records: what reports show and JSON keeps.

Every number is None where it does not apply. The keys of ``summary.json`` are the
fields, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from roundoff.budget import OutputRow
from roundoff.record import Setting
from roundoff.report.strict import from_plain

if TYPE_CHECKING:
    from roundoff.compare import ComparisonSummary

#: Of a field that the JSON has only where there is something in it.
_IF_ANY = {"omit": "empty"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTarget:
    """The target: as it was asked for, in dB of SQNR, and where the dB come from."""

    asked: str
    sqnr_db: float | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutCalls:
    """Calls of one operator that are left out, for one reason.

    ``where`` says of what they are left out: the sites, or every format.
    """

    operator: str
    reason: str
    count: int
    examples: tuple[str, ...]
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How many calls became sites, and those that did not.

    ``no_path`` has a line for each site whose errors do not reach the target. ``mixed``
    sites mix the samples of a batch, so their errors are measured with fewer numbers.
    ``measured_batches`` of ``batches`` were enough for the precision; both are 0 where
    that is not known.
    """

    calls: int
    sites: int
    params: int
    excluded: tuple[LeftOutCalls, ...]
    no_path: tuple[str, ...]
    mixed: int = 0
    measured_batches: int = 0
    batches: int = 0

    @property
    def sampling(self) -> tuple[str, ...]:
        """Sentences on the batches that were measured, and sites that mix samples."""
        sentences = []
        if self.measured_batches < self.batches:
            sentences.append(
                f"{self.measured_batches} of {self.batches} batches gave the precision; "
                "the others ran forward alone."
            )
        if self.mixed:
            sites = "site mixes" if self.mixed == 1 else "sites mix"
            sentences.append(
                f"{self.mixed} {sites} the samples of a batch: fewer numbers, larger ±."
            )
        return tuple(sentences)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingRow:
    """A row of the ranked table: what rounding one site to one format costs.

    Attributes:
        rank: 1 is the worst.
        site: name, ``module.path/operator``.
        operator: its name.
        kind: what the operator is to a format.
        format: that it is rounded to.
        sqnr_db: with this site alone in the format; None for no noise and for infinite.
        stderr_db: standard error of ``sqnr_db``.
        share: of the noise with every site in the format.
        activation_db: SQNR of rounding the operands that depend on the input.
        weight_db: of rounding the parameters.
        output_db: of rounding the result.
        measured: ``adjoint``, to first order, or ``trial``, by running the model with
            this site rounded.
        chosen: format that the plan has for the site.
        note: ``exact``, or what overflows.
        output: of several the one that it costs most, which the numbers belong to.
    """

    rank: int
    site: str
    operator: str = ""
    kind: str = ""
    format: str
    sqnr_db: float | None
    stderr_db: float | None
    share: float
    activation_db: float | None = None
    weight_db: float | None = None
    output_db: float | None = None
    measured: str = "adjoint"
    chosen: str = "fp32"
    note: str = ""
    output: str = field(default="", metadata=_IF_ANY)

    @property
    def is_lost(self) -> bool:
        """True if it has no SQNR because its noise is infinite, not for being exact."""
        return self.sqnr_db is None and self.share > 0

    @property
    def needs_note(self) -> bool:
        """True if the note says what no column shows."""
        return self.note not in ("", "exact")

    @property
    def parts(self) -> dict[str, float]:
        """SQNR in dB of the parts that make an error, by name."""
        parts = {
            "activation": self.activation_db,
            "weight": self.weight_db,
            "output": self.output_db,
        }
        return {name: value for name, value in parts.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Cost of a plan, beside all-fp32 and every site in its cheapest format.

    ``model`` and ``unit`` say what is counted; ``lowest_format`` is what most sites
    take when all are cheapest.
    """

    model: str
    unit: str
    plan: float
    fp32: float
    lowest: float
    lowest_format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A plan in numbers: sites in each format, rules, target, prediction and cost.

    ``formats`` has the format of each site, in the order of the first calls, ``outputs``
    the prediction of each output, where there are several, ``shared`` why sites stay in
    fp32 that alone could leave it.
    """

    sites: Mapping[str, int]
    rules: int
    formats: Mapping[str, str] = field(default_factory=dict, metadata=_IF_ANY)
    target_db: float | None = None
    predicted_db: float | None = None
    outputs: tuple[OutputRow, ...] = field(default=(), metadata=_IF_ANY)
    shared: Mapping[str, str] = field(default_factory=dict, metadata=_IF_ANY)
    note: str = ""
    cost: PlanCost


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRound:
    """One plan tried: SQNR in dB and metric, predicted and measured.

    ``additive_db`` is the prediction without correlations between sites, ``action``
    what was done next. Of several outputs they are of ``output``, the one closest to
    its target or furthest below it.
    """

    round: int
    predicted_db: float | None
    measured_db: float | None
    additive_db: float | None
    metric_predicted: float | None
    metric_measured: float | None
    action: str
    output: str = field(default="", metadata=_IF_ANY)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedResult:
    """What the plan that stands reaches.

    ``native_db`` is the SQNR with real casts, where this device has the format. Of
    several ``outputs`` all are of the one closest to its target or furthest below it.
    """

    target_db: float | None
    predicted_db: float | None
    measured_db: float | None
    native_db: float | None
    native_note: str
    metric_name: str | None
    metric_reference: float | None
    metric_predicted: float | None
    metric_predicted_std: float | None
    metric_measured: float | None
    met: bool
    outputs: tuple[OutputRow, ...] = field(default=(), metadata=_IF_ANY)


@dataclass(frozen=True, slots=True)
class VerificationSummary:
    """Every round of a verification, and the result."""

    rounds: tuple[VerifiedRound, ...]
    result: VerifiedResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffPoint:
    """The cheapest plan for one target; ``relative_cost`` is a share of all-fp32."""

    target_db: float
    predicted_db: float
    cost: float
    relative_cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterPoint:
    """One site rounded alone: SQNR in dB, predicted and measured."""

    site: str
    format: str
    predicted_db: float | None
    measured_db: float | None


@dataclass(frozen=True, slots=True)
class OutputTotal:
    """SQNR in dB of one output with every site in a format, by format, errors added up."""

    output: str
    formats: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisSummary:
    """Everything that a report of ``diagnose`` shows; ``summary.json`` is its JSON.

    ``seconds`` has the time of each stage, ``totals`` what each format costs each of
    several outputs.
    """

    version: str
    workload: str
    formats: tuple[str, ...]
    probes: int
    samples: int
    environment: tuple[Setting, ...]
    target: AskedTarget
    coverage: Coverage
    ranking: tuple[RankingRow, ...]
    plan: PlanSummary
    rounds: tuple[VerifiedRound, ...]
    result: VerifiedResult
    pareto: tuple[TradeoffPoint, ...]
    scatter: tuple[ScatterPoint, ...]
    seconds: Mapping[str, float]
    totals: tuple[OutputTotal, ...] = field(default=(), metadata=_IF_ANY)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DiagnosisSummary:
        """Read what ``json.load`` gives of a ``summary.json``."""
        return from_plain(cls, data)

    @property
    def has_sites(self) -> bool:
        """True if there was anything to measure."""
        return self.coverage.sites > 0

    @property
    def verification(self) -> VerificationSummary:
        """The rounds and the result."""
        return VerificationSummary(self.rounds, self.result)


Verdict = Literal["bug", "rounding", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HigherPrecision:
    """What both sides of a comparison give in fp64.

    Attributes:
        site: the operator that makes them differ; None where the outputs decide.
        error: relative error there, or of the outputs.
        error_fp64: the same in fp64; None where it was not measured.
        output_error: relative distance of the outputs; None without a common tensor.
        output_error_fp64: the same in fp64.
        verdict: ``bug``, ``rounding`` or ``undecided``.
        reason: why, in words.
    """

    site: str | None
    error: float | None
    error_fp64: float | None
    output_error: float | None
    output_error_fp64: float | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnstableValue:
    """A value of one side that differs when the side is recorded again."""

    side: str
    site: str
    phase: str
    line: str | None
    step: int
    difference: float | None
    reason: str | None
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingShare:
    """Share of the output's noise that rounding one site to the format makes."""

    site: str
    share: float | None
    sqnr_db: float | None
    chosen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredComparison:
    """A comparison with its first paragraph; its JSON is that of ``roundoff compare``."""

    answer: str
    summary: ComparisonSummary = field(metadata={"inline": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSummary:
    """Everything that a report of ``diagnose`` with a candidate shows.

    Attributes:
        reference: name of the workload.
        candidate: name of what it is compared with.
        steps: recorded on both sides.
        agrees: True if nothing is blamed and the plan, if any, meets its target.
        notes: about the candidate, and why there is no plan.
        unstable: what does not repeat itself.
        higher_precision: bug or rounding; None where the two sides are equal.
        comparison: the two runs, its culprits with their share of the noise.
        rounding: what rounding each site costs, worst first.
        plan: the diagnosis for a number format; None for other candidates.
    """

    reference: str
    candidate: str
    steps: int
    agrees: bool
    notes: tuple[str, ...]
    unstable: tuple[UnstableValue, ...]
    higher_precision: HigherPrecision | None
    comparison: AnsweredComparison
    rounding: tuple[RoundingShare, ...]
    plan: DiagnosisSummary | None
