"""Is the ranking right? Spearman rank correlation of predicted and measured single-site noise, all sites.

Measured: the site alone runs in the format, all batches are evaluated, and the output is compared with fp32.
Bar: at least 0.97. A row whose rounding changes nothing, predicted and measured, says nothing about the ranking and is
counted apart.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from common import FORMATS, measured_noise, options, progress, table, verdict, workloads
from scipy.stats import spearmanr

import roundoff as ro
from roundoff.plan import run_batches

BAR = 0.97


def main() -> None:
    args = options(__doc__)
    rows, notes = [], []
    for name, workload in workloads(args, ("minilm", "digits", "gpt2", "resnet18")):
        budget = ro.budget(workload, FORMATS)
        reference = run_batches(workload).targets
        lost = [s for s in budget.sites if s["no_path"]]
        for fmt in FORMATS:
            found = budget.table.filter(budget.table["format"] == fmt)
            pairs = []
            for site, predicted in zip(found["site"], found["noise"], strict=True):
                pairs.append(
                    (predicted, measured_noise(workload, {site: fmt}, reference), site)
                )
            progress(f"{name} {fmt}: {len(pairs)} sites")
            rows.append(_row(name, fmt, pairs, notes))
        reasons = Counter(s["no_path"] for s in lost)
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


if __name__ == "__main__":
    main()
