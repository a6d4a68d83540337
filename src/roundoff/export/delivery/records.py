"""What the reports of ``roundoff quantize`` show: one record for all, and its rows.

``summary.json`` has the fields of these records as keys, in their order. Nothing here
needs torch, as the reports do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundoff.budget import OutputRow

if TYPE_CHECKING:
    from roundoff.export.onnx.runtime import Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One plan that the search for a target quantized and measured.

    Attributes:
        sites: format -> number of sites in it.
        predicted_db, measured_db: SQNR in dB of the output closest to its target, or
            furthest below it, by the budget (None where it predicts nothing) and measured.
        metric: the workload's metric; None without one.
        cost: of the plan, in the unit that was asked for.
        met: it meets the target.
        outputs: each named output: predicted, measured, target.
    """

    sites: Mapping[str, int]
    predicted_db: float | None
    measured_db: float
    metric: float | None
    cost: float | None
    met: bool
    outputs: tuple[OutputRow, ...] = ()


@dataclass(frozen=True, slots=True)
class PrunedRow:
    """One parameter or group of channels: its size before and after, or why it stays."""

    name: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """A number of the whole model and of the pruned one."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class PruningCost:
    """What pruning saved in fp32.

    Attributes:
        macs: multiply-accumulates of one batch.
        bytes: bytes of parameters and buffers.
        time: time of the pruned model over that of the whole one in PyTorch, in turns.
    """

    macs: BeforeAfter
    bytes: BeforeAfter
    time: float


@dataclass(frozen=True, slots=True)
class NotPruned:
    """Nothing was pruned, so nothing was saved: ``{}`` in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSiteRow:
    """One call of the model.

    Attributes:
        site: path of the call.
        operator, kind: what it is.
        format: format that it runs in.
        state: ``quantized``, ``codes`` (reads or writes codes because its neighbours do)
            or ``fp32``.
        weights, values: format and granularity of both operands; empty for none.
        observer: what chose the ranges of the values that it reads; empty for none.
        sqnr_db: SQNR of what the call returns on one batch, with everything before it
            quantized too, against full precision with BatchNorm folded and channels
            divided alike (``unrounded``; of a pruned model, what pruning left). None
            where the call was not compared.
        own_db: SQNR of rounding alone what it returned.
        reason: why it is fp32, or on codes.
        share: share of the noise that the budget predicts for the output; None without
            a target.
    """

    site: str
    operator: str
    kind: str
    format: str
    state: str
    weights: str
    values: str
    observer: str
    sqnr_db: float | None
    own_db: float | None
    reason: str
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedSiteRow(QuantizedSiteRow):
    """One call of the model, with what ONNX Runtime makes of it.

    Attributes:
        file_db: SQNR of the value in the file against fp32.
        artefact_db: SQNR of the value in the file against the simulation.
        codes: greatest difference of a code that the kernel makes by itself.
        differing: share of codes that it makes differ.
        carried: share of codes that differ with everything before it.
        kernel: kernels that run the call.
        integer: they compute with integers; None for a call that is not quantized.
        kernel_reason: why they do not, or what to know.
    """

    file_db: float | None
    artefact_db: float | None
    codes: int | None
    differing: float | None
    carried: float | None
    kernel: str
    integer: bool | None
    kernel_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffRow:
    """One format for the whole model, in simulation.

    Attributes:
        name: the format, ``fp32``, or ``chosen`` for the model that was made.
        bytes: weights as stored.
        work: bit operations relative to fp32: a cost model, no measurement.
        db: SQNR of the output in dB.
        metric: the workload's metric; None without one.
        agreement: share of equal top choices; None for outputs without rows.
        reason: why the format cannot be run, which leaves the numbers None.
    """

    name: str
    bytes: int | None = None
    work: float | None = None
    db: float | None = None
    metric: float | None = None
    agreement: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file: its bytes, or None with the reason where it could not be written."""

    name: str
    what: str
    bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked for; see ``Ask``.

    Attributes:
        target: as written; None without one.
        kind, value: ``drop`` or ``db``, and the number; None where each output has one.
        of: a part of the output that the model is judged by; None for all of it.
        formats: empty where a plan was given.
        plan: a plan was given.
        cost: unit of what a target's plan saves.
        observer, weights: what chose the ranges of values, how weights were rounded.
    """

    target: str | None
    kind: str | None
    value: float | None
    of: str | None
    formats: tuple[str, ...]
    plan: bool
    prune: str
    cost: str
    skip: tuple[str, ...]
    pin: Mapping[str, str]
    qat: bool
    epochs: int
    observer: str
    weights: str


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """The data that was calibrated on."""

    batches: int
    samples: int


@dataclass(frozen=True, slots=True)
class JudgedOn:
    """The data that the model was judged on; ``held_out``: calibration has not seen it."""

    batches: int
    samples: int
    held_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How the quantized model does against fp32.

    Attributes:
        met: it keeps the target, or there is none.
        sqnr_db: SQNR in dB of the output closest to its target, or furthest below it;
            without a target of the one with most noise.
        outputs: each named output, on the data that the model was judged on.
        agreement: share of equal top choices; None for outputs without rows.
        metric_name, metric_reference, metric, drop: the workload's metric, in fp32, of
            this model, and the difference; None without one.
    """

    met: bool
    sqnr_db: float
    outputs: tuple[OutputRow, ...]
    agreement: float | None
    metric_name: str | None
    metric_reference: float | None
    metric: float | None
    drop: float | None


@dataclass(frozen=True, slots=True)
class ExcludedRow:
    """Calls that are no site, and why."""

    operator: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCoverage:
    """How many sites there are, by state, and how many of them multiply."""

    sites: int
    quantized: int
    codes: int
    fp32: int
    products: int
    products_quantized: int
    excluded: tuple[ExcludedRow, ...]


@dataclass(frozen=True, slots=True)
class AverageBits:
    """Bits a weight and a value that products read; None where there is none."""

    weight: float | None
    value: float | None


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights as stored, and in fp32."""

    bytes: int
    fp32: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step and the SQNR of the output in dB around it; None where not measured."""

    name: str
    before: float | None
    after: float | None
    note: str


@dataclass(frozen=True, slots=True)
class NoteRow:
    """A remark on a quantizer."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSummary:
    """What ONNX Runtime computed, and how fast; the fields of ``Proof`` that are totals.

    Attributes:
        met: the file keeps the target, or there is none.
        outputs: each named output of the file against fp32.
        kernels: integer operators of the optimised graph, and how many there are.
        operators: all of its operators.
    """

    met: bool
    samples: int
    metric: float | None
    metric_fp32: float | None
    agreement: float | None
    sqnr_db: float
    outputs: tuple[OutputRow, ...]
    simulation_db: float
    codes: int
    differing: float
    kernels: Mapping[str, int]
    operators: Mapping[str, int]
    latency: Latency | None
    bytes: int
    bytes_fp32: int
    notes: tuple[NoteRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole answer of ``roundoff quantize``.

    Attributes:
        version: version of roundoff.
        workload: its name.
        torch, threads: what it ran on.
        asked, calibration, judged_on, result: the question, the data and the answer.
        sites: one row for each call; ``ProvedSiteRow`` where there is a proof.
        coverage: how many of them are quantized.
        formats: format -> number of sites, most first.
        bits: average widths.
        weights: bytes.
        chosen: the model beside single formats.
        steps: what was done, with the SQNR after it.
        trials: what a target's search measured.
        pruned, pruning: what pruning did and saved.
        tradeoff: each usual format alone; empty where not asked for.
        proof: what ONNX Runtime did; None without an export.
        files: what was written.
        notes: remarks for the reader.
        lost: what AMCT's record cannot hold.
        seconds: by stage.
    """

    version: str
    workload: str
    torch: str
    threads: int
    asked: Asked
    calibration: CalibrationData
    judged_on: JudgedOn
    result: Result
    sites: tuple[QuantizedSiteRow, ...]
    coverage: QuantizedCoverage
    formats: Mapping[str, int]
    bits: AverageBits
    weights: WeightBytes
    chosen: TradeoffRow
    steps: tuple[StepRow, ...]
    trials: tuple[TrialRow, ...]
    pruned: tuple[PrunedRow, ...]
    pruning: PruningCost | NotPruned
    tradeoff: tuple[TradeoffRow, ...]
    proof: ProofSummary | None
    files: tuple[FileRow, ...]
    notes: tuple[str, ...]
    lost: tuple[str, ...]
    seconds: Mapping[str, float]

    @property
    def met(self) -> bool:
        """True if model and file keep the target, or there is none."""
        return self.result.met and (self.proof is None or self.proof.met)
