"""What ``roundoff quantize`` made, as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.budget import OutputRow, deciding
from roundoff.export import (
    AverageBits,
    NotPruned,
    ProvedSiteRow,
    PruningCost,
    QuantizedSiteRow,
    Result,
    Summary,
)
from roundoff.ops import MULTIPLYING_KINDS
from roundoff.report.bench_answer import times
from roundoff.report.figures import (
    NONE,
    count,
    db,
    finite,
    listing,
    metric,
    percent,
    ratio,
)

#: What the SQNR of sites is measured against.
AGAINST = "SQNR of what a site returns, against fp32 with channels scaled alike"


def answer(summary: Summary) -> list[str]:
    """Return the verdict, then what is quantized, how exact, how large and how fast."""
    sentences = [verdict(summary), _quantized(summary), _exactness(summary)]
    if not isinstance(summary.pruning, NotPruned):
        sentences.append(pruned(summary.asked.prune, summary.pruning))
    sentences.append(_weights(summary))
    if summary.proof is not None:
        return sentences + _proved(summary)
    reasons = [file.reason for file in summary.files if file.name == "model.onnx"]
    why = next(iter(reasons), "")
    if why and not why.startswith("--"):
        sentences.append(f"model.onnx could not be made, all else is simulated: {why}.")
    return sentences


def verdict(summary: Summary) -> str:
    """Say if the target is met, with what was asked and measured."""
    result = summary.result
    asked = summary.asked
    noise = f"{db(result.sqnr_db)} dB{_at(result.outputs)}"
    fall = _fall(result)
    if asked.target is None:
        return f"Quantized: {fall or noise}."
    met = _met(summary)
    in_file = _in_file(summary)
    if asked.kind == "db":
        return f"{met}: {noise}{in_file}, {_asked_db(summary)} asked."
    return f"{met}: {fall}{in_file}; at most {asked.target} less asked."


def _met(summary: Summary) -> str:
    """Return if the target is met, by the simulation and by the file."""
    if summary.met:
        return "The target is met"
    if summary.result.met:
        return "The target is met by the simulation and missed by model.onnx"
    return "The target is missed"


def _in_file(summary: Summary) -> str:
    """Return what the file reaches where that decides; empty elsewhere."""
    proof = summary.proof
    if proof is None or proof.met or not summary.result.met:
        return ""
    if summary.asked.kind == "db":
        return f", {db(proof.sqnr_db)} dB{_at(proof.outputs)} of the file"
    return f", {metric(proof.metric)} of the file"


def _at(outputs: Sequence[OutputRow]) -> str:
    """Return the output that the SQNR belongs to; empty where there is only one."""
    return f" at {deciding(outputs).output}" if len(outputs) > 1 else ""


def _asked_db(summary: Summary) -> str:
    """Return what was asked of the output that the verdict names."""
    target = summary.asked.target or ""
    least = deciding(summary.result.outputs).target_db
    return target if "=" not in target or least is None else f"{db(least)} dB"


def _fall(result: Result) -> str:
    """Return how the metric stands to that of fp32; empty without one."""
    if result.metric_name is None:
        return ""
    reference = metric(result.metric_reference)
    return f"{result.metric_name} {metric(result.metric)}, {fell(result.drop)} {reference} in fp32"


def fell(drop: float | None) -> str:
    """Return how a metric stands to that of fp32.

    >>> fell(0.004), fell(-0.001), fell(0.0)
    ('0.004 below', '0.001 above', 'equal to')
    """
    if drop is None:
        return NONE
    if abs(drop) < 1e-12:
        return "equal to"
    side = "below" if drop > 0 else "above"
    return f"{abs(drop):.2g} {side}"


def _quantized(summary: Summary) -> str:
    coverage = summary.coverage
    products = count(coverage.products, "product")
    sentence = f"{coverage.products_quantized} of {products} are quantized"
    kinds = listing([f"{number} in {name}" for name, number in summary.formats.items()])
    if not kinds:
        return f"{sentence}."
    return f"{sentence} ({kinds}){bits(summary.bits)}."


def _exactness(summary: Summary) -> str:
    samples = count(summary.judged_on.samples, "sample")
    where = f"{samples} held out" if summary.judged_on.held_out else samples
    result = summary.result
    output = "the output"
    if len(result.outputs) > 1:
        output = f"{deciding(result.outputs).output}, which decides of {len(result.outputs)} outputs,"
    sentence = f"On {where}: SQNR of {output} {db(result.sqnr_db)} dB"
    agreement = summary.result.agreement
    if agreement is None:
        return f"{sentence}."
    return f"{sentence}, the same first choice as fp32 for {percent(agreement)}."


def _weights(summary: Summary) -> str:
    weights = summary.weights
    share = percent(ratio(weights.bytes, weights.fp32))
    return f"Weights take {size(weights.bytes)}, {share} of fp32's."


def pruned(how: str, saved: PruningCost) -> str:
    """Return what pruning left, against the whole model in fp32.

    >>> from roundoff.export import BeforeAfter
    >>> half = BeforeAfter(2_000_000, 1_000_000)
    >>> pruned("channel:0.3", PruningCost(half, half, 0.6))
    'Pruned (channel:0.3): 50.0% of the multiply-accumulates, 1.00 MB of 2.00 MB, 0.60× the time in PyTorch, all in fp32.'
    >>> same = BeforeAfter(9_000, 9_000)
    >>> pruned("2:4", PruningCost(same, same, 1.01))
    'Pruned (2:4): zeros in their places; ordinary kernels do the same work (1.01× the time in PyTorch, 9 kB as before).'
    """
    macs = saved.macs
    stored = saved.bytes
    after = size(stored.after)
    took = f"{times(saved.time)} the time in PyTorch"
    if stored.after == stored.before and macs.after == macs.before:
        return (
            f"Pruned ({how}): zeros in their places; ordinary kernels do the same work "
            f"({took}, {after} as before)."
        )
    work = percent(ratio(macs.after, macs.before))
    return (
        f"Pruned ({how}): {work} of the multiply-accumulates, "
        f"{after} of {size(stored.before)}, {took}, all in fp32."
    )


def _proved(summary: Summary) -> list[str]:
    """Return what ONNX Runtime made of model.onnx."""
    proof = summary.proof
    if proof is None:
        return []
    share = percent(ratio(proof.bytes, proof.bytes_fp32))
    operators = [f"{number} {name}" for name, number in proof.kernels.items()]
    kernels = listing(operators) or "no integer kernel"
    speed = f"ONNX Runtime runs {kernels}."
    if proof.latency is not None:
        faster = times(proof.latency.ratio)
        speed = f"ONNX Runtime runs it {faster} as fast as fp32 (in turns, one thread): {kernels}."
    remarks = {
        f"{row.kernel_reason}."
        for row in proved_sites(summary)
        if row.integer and row.kernel == "MatMulNBits"
    }
    against = f"Against the simulation {_code_differences(summary)}"
    return [
        f"model.onnx is {size(proof.bytes)}, {share} of fp32's.",
        speed,
        f"{against}; its output is {db(proof.simulation_db)} dB from it.",
        *sorted(remarks),
    ]


def _code_differences(summary: Summary) -> str:
    proof = summary.proof
    if proof is None or all(row.codes is None for row in proved_sites(summary)):
        return "there are no codes of values to compare"
    if not proof.codes:
        return "every code is equal"
    share = percent(proof.differing)
    return f"codes differ by {proof.codes} at most, {share} of the codes of one value"


def bits(average: AverageBits) -> str:
    """Return average widths, as the end of a sentence.

    >>> bits(AverageBits(4.96, 8.0)), bits(AverageBits(None, None))
    (', 5.0 bits a weight and 8.0 a value they read', '')
    """
    if average.weight is None or average.value is None:
        return ""
    return f", {average.weight:.1f} bits a weight and {average.value:.1f} a value they read"


def size(number: int | None) -> str:
    """Return bytes as text, in decimal units.

    >>> size(295_000), size(1_200_000), size(None)
    ('295 kB', '1.20 MB', '–')
    """
    if number is None:
        return NONE
    if number < 1000:
        return f"{number} B"
    for least, unit in ((1e9, "GB"), (1e6, "MB")):
        if number >= least:
            return f"{number / least:.2f} {unit}"
    return f"{number / 1e3:.0f} kB"


def weakest(summary: Summary, top: int = 10) -> list[QuantizedSiteRow]:
    """Return the sites that cost the output most, by their share of the budget's noise.

    Without a budget (no target) those whose results are furthest from fp32. Sites
    without the one or the other are left out.
    """
    if is_ranked(summary):
        costly = [row for row in summary.sites if row.share]
        return sorted(costly, key=lambda row: -(row.share or 0.0))[:top]
    compared = [(row.sqnr_db, row) for row in summary.sites if finite(row.sqnr_db)]
    return [row for _, row in sorted(compared, key=lambda pair: pair[0])[:top]]


def is_ranked(summary: Summary) -> bool:
    """Return True if a budget says what each site costs the output."""
    return any(row.share is not None for row in summary.sites)


def sites_in_fp32(summary: Summary) -> list[tuple[str, list[str]]]:
    """Return reason and sites that stay in fp32: products first, then by number."""
    sites_of: dict[str, list[str]] = {}
    for row in summary.sites:
        if row.state == "fp32":
            sites_of.setdefault(row.reason, []).append(row.site)
    products = {row.site for row in summary.sites if row.kind in MULTIPLYING_KINDS}
    return sorted(
        sites_of.items(),
        key=lambda item: (products.isdisjoint(item[1]), -len(item[1])),
    )


def proved_sites(summary: Summary) -> list[ProvedSiteRow]:
    """Return the rows that say what ONNX Runtime does; none without a proof."""
    return [row for row in summary.sites if isinstance(row, ProvedSiteRow)]


def without_integer_kernel(summary: Summary) -> list[ProvedSiteRow]:
    """Return the quantized sites that ONNX Runtime does not run with integers."""
    return [
        row
        for row in proved_sites(summary)
        if row.integer is False and row.state != "fp32"
    ]


@dataclass(frozen=True, slots=True)
class TrialLine:
    """One trial of the search for the target, as text."""

    trial: str
    formats: str
    predicted: str
    measured: str
    metric: str
    cost: str


def trials(summary: Summary) -> list[TrialLine]:
    """Return what the search for the target measured."""
    lines = []
    for number, trial in enumerate(summary.trials, start=1):
        formats = [f"{sites} {name}" for name, sites in trial.sites.items()]
        lines.append(
            TrialLine(
                trial=str(number),
                formats=listing(formats) or "none",
                predicted=db(trial.predicted_db),
                measured=db(trial.measured_db),
                metric=metric(trial.metric),
                cost=NONE if trial.cost is None else f"{trial.cost:.4g}",
            )
        )
    return lines
