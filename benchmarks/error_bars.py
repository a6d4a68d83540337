"""Do the error bars of a budget hold, where samples are mixed and where rows are no samples?

Networks so small that trials of every row cost less are tried by default; they stand twice, once measured by the
adjoint alone. Each model is measured with as many seeds as asked, and once with 600 probes, which is taken as the
truth (its own error is 0.25 dB at the very most, where nothing but probes tells errors apart). Every row of every
seed is compared: root mean square in dB, how many are within two of the standard errors that are printed beside
them, and the rank correlation of the sites. Bars: coverage 0.93 to 0.99, rms at most 0.7 dB.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import options, progress, table, verdict
from scipy.stats import spearmanr
from torch import Tensor, nn

import roundoff as ro

FORMATS = ("bf16", "int8")
TRUTH = 600
#: Seeds and probes of the truth with --quick, and the cases.
QUICK = (1, 8)
QUICK_CASES = ("GPT, mean of the batch subtracted", "the same network, by the adjoint")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        output: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return output


class Language(nn.Module):
    """A GPT; ``rows`` flattens its output as training code does, ``centred`` subtracts the mean of the batch."""

    def __init__(self, *, rows: bool, centred: bool = False) -> None:
        super().__init__()
        self.rows = rows
        self.centred = centred
        self.tokens = nn.Embedding(200, 64)
        self.places = nn.Embedding(24, 64)
        self.blocks = nn.Sequential(Block(64, 4), Block(64, 4), Block(64, 4))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 200)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        if self.centred:
            logits = logits - logits.mean(0)
        output: Tensor = logits.flatten(0, 1) if self.rows else logits
        return output


class Graph(nn.Module):
    """Nodes that add what their neighbours say: every site mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.said = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.kept = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.last = nn.Linear(32, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.first(nodes))
        for said, kept in zip(self.said, self.kept, strict=True):
            heard = torch.zeros_like(h).index_add(0, edges[1], said(h)[edges[0]])
            h = torch.relu(kept(h) + heard)
        output: Tensor = self.last(h)
        return output


def _sentences(batches: int = 4) -> list[Tensor]:
    return [torch.randint(0, 200, (8, 24)) for _ in range(batches)]


def _graphs() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(60, 8), torch.randint(0, 60, (2, 200))) for _ in range(4)]


def _centred() -> Language:
    return Language(rows=False, centred=True)


#: Model, data, and how many rows may be tried: None leaves it to the budget.
CASES: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], int | None]
] = {
    "GPT, (batch x tokens, vocabulary)": (
        lambda: Language(rows=True),
        _sentences,
        None,
    ),
    "GPT, (batch, tokens, vocabulary)": (
        lambda: Language(rows=False),
        _sentences,
        None,
    ),
    "GPT, mean of the batch subtracted": (_centred, _sentences, None),
    "the same, by the adjoint": (_centred, _sentences, 0),
    "graph network": (Graph, _graphs, None),
    "the same network, by the adjoint": (Graph, _graphs, 0),
}


def main() -> None:
    args = options(__doc__)
    seeds, probes = QUICK if args.quick else (30, TRUTH)
    rows = []
    for name, (model, data, trials) in CASES.items():
        if args.quick and name not in QUICK_CASES:
            continue
        torch.manual_seed(0)
        workload = ro.Workload(model(), data(), name=name)
        truth = _rows(ro.budget(workload, FORMATS, probes=probes, trials=0))
        runs = []
        for seed in range(1, seeds + 1):
            runs.append(ro.budget(workload, FORMATS, seed=seed, trials=trials))
            progress(f"{name}: seed {seed} of {seeds}")
        rows.append(_row(name, truth, runs))
    table(
        f"Error bars of {seeds} seeds against {probes} probes",
        (
            "model",
            "probes, batches",
            "sites that mix",
            "rms dB",
            "bar 0.7",
            "within 2 sigma",
            "bar 0.93 to 0.99",
            "off by over 1 dB",
            "rank correlation, least",
        ),
        rows,
    )


def _rows(budget: ro.Budget) -> dict[tuple[str, str], tuple[float, float]]:
    """SQNR and its standard error, by site and format."""
    return {
        (cost.site, cost.format): (cost.sqnr_db, cost.stderr_db or 0.0)
        for cost in budget.costs
        if cost.sqnr_db is not None
    }


def _row(
    name: str,
    truth: dict[tuple[str, str], tuple[float, float]],
    runs: list[ro.Budget],
) -> tuple[object, ...]:
    errors = []
    within: list[bool] = []
    ranks = []
    for run in runs:
        found = _rows(run)
        shared = [key for key in truth if key in found]
        off = [found[key][0] - truth[key][0] for key in shared]
        errors.extend(off)
        within.extend(
            abs(error) <= 2 * math.hypot(found[key][1], truth[key][1])
            for key, error in zip(shared, off, strict=True)
        )
        ranks.append(
            spearmanr(
                [found[key][0] for key in shared], [truth[key][0] for key in shared]
            ).statistic
        )
    rms = float(np.sqrt(np.mean(np.square(errors))))
    coverage = float(np.mean(within))
    about = runs[0].about
    is_tried = all(cost.measured == "trial" for cost in runs[0].costs)
    mixing = f"{len(runs[0].mixing_sites)} of {len(runs[0].sites)}"
    return (
        name,
        f"{'tried' if is_tried else about.probes}, {len(about.batch_samples)} of {about.workload_batches}",
        "not looked for" if is_tried else mixing,
        f"{rms:.2f}",
        verdict(rms, 0.7, at_most=True),
        f"{coverage:.3f}",
        _verdict_of_bars(rms, coverage),
        f"{np.mean(np.abs(errors) > 1):.1%}",
        f"{min(ranks):.3f}",
    )


def _verdict_of_bars(rms: float, coverage: float) -> str:
    """Judge the coverage of rows that have an error: what is exact lies within any bar."""
    if rms < 0.005 and coverage == 1:
        return "exact"
    return "met" if 0.93 <= coverage <= 0.99 else "**missed**"


if __name__ == "__main__":
    main()
