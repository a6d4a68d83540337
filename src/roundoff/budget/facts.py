"""The facts of a budget: its sites and how it was measured, JSON in its file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from roundoff.record import Setting, settings_of

if TYPE_CHECKING:
    from roundoff.ops import Excluded


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSite:
    """One operator call inside one module, and what a plan may do with it.

    Attributes:
        site: name, ``module.path/operator``.
        operator: name of the operator.
        kind: what the operator is to a format, such as ``linear`` or ``softmax``.
        params: names of the parameters that it reads.
        sizes: elements and multiply-accumulates of one batch, arguments of ``Work``.
        refused: why it does not run in a format, by format.
        no_path: why no error of it reaches the target; None where errors do.
        batches: batches in which it was called.
        tied: sites that share its format, because one writes into what the other made.
    """

    site: str
    operator: str
    kind: str
    params: tuple[str, ...] = ()
    sizes: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    no_path: str | None = None
    batches: int = 1
    tied: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MeasuredSite:
        """Read a site of a file; those of older files are not tied."""
        params = tuple(data["params"])
        return cls(**{**data, "params": params, "tied": tuple(data.get("tied", ()))})


@dataclass(frozen=True, slots=True)
class ExcludedCalls:
    """Calls of one operator that did not become sites, for one reason."""

    operator: str
    reason: str
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasuredTarget:
    """What errors are measured at: its name, and the shape of each of its tensors."""

    name: str
    tensors: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class MeasuredOutput:
    """One named output, whose noise is relative to its own power.

    Attributes:
        name: of its tensor, or a glob that names several.
        tensors: names of its tensors.
        signal: power over all batches; of several tensors each in units of its power in
            the first batch.
        batch_signal: share of the signal in each batch.
    """

    name: str
    tensors: tuple[str, ...]
    signal: float
    batch_signal: tuple[float, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MeasuredOutput:
        """Read the output of a file."""
        shares = tuple(data["batch_signal"])
        return cls(data["name"], tuple(data["tensors"]), data["signal"], shares)


@dataclass(frozen=True, slots=True)
class MetricLevel:
    """The metric with noise at ``db`` (SQNR): mean and standard deviation of draws."""

    db: float
    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class MetricCurve:
    """The metric of the reference outputs, and with noise of each level added."""

    name: str
    reference: float
    levels: tuple[MetricLevel, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MetricCurve:
        """Read the curve of a file."""
        levels = tuple(MetricLevel(**level) for level in data["levels"])
        return cls(data["name"], data["reference"], levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How a budget was measured.

    Attributes:
        version: of roundoff.
        workload: its name.
        formats: names of the measured formats, without fp32.
        probes: sign vectors a sample (K), for each output.
        seed: of the sign vectors.
        samples: of all batches together.
        signal: power of the target tensor.
        workload_batches: batches of the workload; 0 where all were measured.
        batch_samples: samples of each measured batch.
        batch_signal: share of the signal in each batch.
        sample_signal: share of the signal in each sample.
        forwards: forward passes a batch.
        target: what errors are measured at.
        outputs: the named outputs in it, each with probes of its own and noise relative
            to its own power, in the order of the rows of the projections. Empty where
            the target is one output: budgets of older files, and of gradients.
        not_measured: tensors and outputs that are no target, with the reason.
        around: site to format of the rounded model that was linearised around.
        batched: False where probes went back one by one, because some operator's backward
            cannot be batched.
        calls: operator calls of one batch.
        excluded: calls that did not become sites.
        environment: the settings that change numbers.
        parameters: elements of each parameter; None where not kept.
        metric: how noise moves the metric; None without one.
        trials: rows (a site in a format) that were measured by trial; None in files of
            older versions.
        batch_error: what the noise of the measured batches may be off by as that of all,
            as a share of it, in formats whose samples share a scale, see
            ``roundoff.budget.batch_noise``; 0 in older files.
        vendor_kernels: True where the vendor's fused kernels ran; None where not asked.
    """

    version: str = "of unknown version"
    workload: str
    formats: tuple[str, ...]
    probes: int
    seed: int
    samples: int
    signal: float
    batch_samples: tuple[int, ...]
    batch_signal: tuple[float, ...]
    sample_signal: tuple[float, ...]
    workload_batches: int = 0
    forwards: int = 1
    target: MeasuredTarget
    outputs: tuple[MeasuredOutput, ...] = ()
    not_measured: Mapping[str, str] = field(default_factory=dict)
    around: Mapping[str, str]
    batched: bool
    calls: int
    excluded: tuple[ExcludedCalls, ...]
    environment: tuple[Setting, ...]
    parameters: Mapping[str, int] | None = None
    metric: MetricCurve | None = None
    vendor_kernels: bool | None = None
    trials: int | None = None
    batch_error: float = 0.0

    @property
    def unmeasured(self) -> float:
        """Share of the workload's batches that were not measured."""
        batches = max(self.workload_batches, len(self.batch_samples))
        return 1 - len(self.batch_samples) / batches if batches else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data; those that are not known are left out."""
        data = asdict(self)
        optional = ("parameters", "metric", "vendor_kernels", "trials")
        unknown = [name for name in optional if data[name] is None]
        return {key: value for key, value in data.items() if key not in unknown}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Read the facts of a file."""
        excluded = tuple(
            ExcludedCalls(**{**row, "examples": tuple(row["examples"])})
            for row in data["excluded"]
        )
        metric = data.get("metric")
        outputs = tuple(map(MeasuredOutput.from_dict, data.get("outputs", ())))
        records = {
            "outputs": outputs,
            "target": MeasuredTarget(**data["target"]),
            "excluded": excluded,
            "environment": settings_of(data["environment"]),
            "metric": None if metric is None else MetricCurve.from_dict(metric),
        }
        lists = ("formats", "batch_samples", "batch_signal", "sample_signal")
        tuples = {name: tuple(data[name]) for name in lists}
        return cls(**{**data, **tuples, **records})


def excluded_calls(rows: Iterable[Excluded], batches: int) -> tuple[ExcludedCalls, ...]:
    """Return the calls of one batch that did not become sites."""
    return tuple(
        ExcludedCalls(
            row.operator,
            row.reason,
            math.ceil(row.count / batches),
            tuple(row.examples),
        )
        for row in rows
    )
