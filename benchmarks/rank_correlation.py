"""Is the ranking right? Spearman rank correlation of predicted and measured single-site noise, all sites.

With --networks: on every network of examples/zoo and of decision_nets.py, with and without trials, and the share of
sites within 1.5 dB. Names after --only choose networks.

Measured: the site alone runs in the format, all batches are evaluated, and the output is compared with fp32.
Bar: at least 0.97. A row whose rounding changes nothing, predicted and measured, says nothing about the ranking and is
counted apart.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from common import (
    FORMATS,
    ROOT,
    measured_noise,
    options,
    progress,
    table,
    verdict,
    workloads,
)
from decision_nets import NETS
from decision_nets import workload as decision_net
from scipy.stats import spearmanr
from torch import Tensor

import roundoff as ro
from roundoff.plan import output_noises, run_batches
from roundoff.workload import Workload

BAR = 0.97


def main() -> None:
    args = options(__doc__)
    rows: list[tuple[object, ...]] = []
    notes: list[str] = []
    for name, workload in workloads(args, ("minilm", "digits", "gpt2", "resnet18")):
        budget = ro.budget(workload, FORMATS)
        reference = run_batches(workload).targets
        lost = [s for s in budget.sites if s.no_path]
        for fmt in FORMATS[:1] if args.quick else FORMATS:
            found = budget.table.filter(budget.table["format"] == fmt)
            pairs = []
            for site, predicted in zip(found["site"], found["noise"], strict=True):
                pairs.append(
                    (predicted, measured_noise(workload, {site: fmt}, reference), site)
                )
            progress(f"{name} {fmt}: {len(pairs)} sites")
            rows.append(_row(name, fmt, pairs, notes))
        reasons = Counter(s.no_path for s in lost)
        notes += [
            f"{name}: {count} of {len(budget.sites)} sites not ranked: {why}"
            for why, count in reasons.items()
        ]
    table(
        "Predicted against measured noise of one site rounded alone",
        (
            "workload",
            "format",
            "sites",
            "no error",
            "rank correlation",
            f"bar {BAR}",
            "median dB off",
            "95 % within",
            "max dB off",
        ),
        rows,
    )
    print("\n" + "\n".join(f"- {note}" for note in notes))


def _row(
    name: str, fmt: str, pairs: list[tuple[float, float, str]], notes: list[str]
) -> tuple[object, ...]:
    ranked = [p for p in pairs if p[0] or p[1]]
    predicted, measured = (np.array([p[i] for p in ranked]) for i in (0, 1))
    rank = float(spearmanr(predicted, measured).statistic)
    both = (
        np.isfinite(predicted)
        & np.isfinite(measured)
        & (predicted > 0)
        & (measured > 0)
    )
    off = np.abs(10 * np.log10(predicted[both] / measured[both]))
    for p, m, site in ranked:
        if not (p and m):
            notes.append(f"{name}, {fmt}: {site} predicted {_db(p)}, measured {_db(m)}")
    worst = int(np.argmax(off))
    p, m, site = [r for r, keep in zip(ranked, both, strict=True) if keep][worst]
    notes.append(
        f"{name}, {fmt}: furthest off is {site}: predicted {_db(p)}, measured {_db(m)}"
    )
    overflow = int((~both).sum())
    if overflow:
        notes.append(
            f"{name}, {fmt}: {overflow} sites have no finite pair of dB (ranked, not in the dB columns)"
        )
    return (
        name,
        fmt,
        len(ranked),
        len(pairs) - len(ranked),
        f"{rank:.4f}",
        verdict(rank, BAR),
        f"{np.median(off):.2f}",
        f"{np.quantile(off, 0.95):.2f}",
        f"{off.max():.2f}",
    )


def _db(noise: float) -> str:
    if noise == 0:
        return "no error"
    return f"{-10 * math.log10(noise):.1f} dB" if math.isfinite(noise) else "overflow"


def networks(names: Sequence[str] | None) -> None:
    """Print correlation and share within 1.5 dB on each network, with and without trials."""
    loaders: dict[str, Callable[[], Workload]] = {
        path.stem: functools.partial(Workload.load, path)
        for path in sorted((ROOT / "examples" / "zoo").glob("*.py"))
    }
    loaders |= {name: functools.partial(decision_net, name) for name in NETS}
    rows = []
    for name in names or loaders:
        rows += _network(name, loaders[name]())
        progress(name)
    header = ("network", "format", "sites", "trials")
    both = ("rank, adjoint", "within 1.5 dB", "rank, with trials", "within 1.5 dB")
    table("One site rounded alone, predicted and measured", header + both, rows)


def _network(name: str, workload: Workload) -> list[tuple[object, ...]]:
    plain = ro.budget(workload, FORMATS, trials=0)
    tried = ro.budget(workload, FORMATS)
    reference = run_batches(workload).targets
    rows = []
    for fmt in FORMATS:
        sites = [site.site for site in tried.sites if fmt not in site.refused]
        measured = {s: _worst_output(workload, {s: fmt}, reference) for s in sites}
        trials = sum(c.measured == "trial" for c in tried.costs if c.format == fmt)
        columns = [*_agreement(plain, fmt, measured), *_agreement(tried, fmt, measured)]
        rows.append((name, fmt, len(sites), trials, *columns))
    return rows


def _worst_output(
    workload: Workload, formats: dict[str, str], reference: list[dict[str, Tensor]]
) -> float:
    """Noise of the named output that has most, as a row of a budget has it."""
    targets = run_batches(workload, formats).targets
    rows = output_noises(targets, reference, workload.judged.apart)
    return max(row.noise for row in rows if row.noise is not None)


def _agreement(
    budget: ro.Budget, fmt: str, measured: dict[str, float]
) -> tuple[str, str]:
    """Rank correlation and share within 1.5 dB, of sites that cost anything; one without a row counts as no noise."""
    noise = {cost.site: cost.noise for cost in budget.costs if cost.format == fmt}
    pairs = [(noise.get(site, 0.0), value) for site, value in measured.items()]
    ranked = [pair for pair in pairs if any(pair)]
    if len(ranked) < 2:
        return "–", "–"
    predictions = [predicted for predicted, _ in ranked]
    rank = float(spearmanr(predictions, [value for _, value in ranked]).statistic)
    near = [_is_near(predicted, value) for predicted, value in ranked]
    return f"{rank:.3f}", f"{np.mean(near):.0%}"


def _is_near(predicted: float, measured: float) -> bool:
    if not (0 < predicted < math.inf and 0 < measured < math.inf):
        return predicted == measured
    return abs(10 * math.log10(predicted / measured)) <= 1.5


if __name__ == "__main__":
    if "--networks" in sys.argv:
        sys.argv.remove("--networks")
        networks(options(__doc__).only)
    else:
        main()
