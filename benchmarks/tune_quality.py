"""Is the plan of ``roundoff tune`` better than the built-in autocast? Gradient SQNR at equal cost, and at 20 % more.

GPT-2, ResNet-18 and fine-tuning of all-MiniLM-L6-v2, small, one training step's gradients measured by simulated runs in
bf16, against the lists of torch.autocast for the CPU and for CUDA. Bar: at least 3 dB at equal cost and at least 10 dB at
20 % more; where the optimum itself is less, the Pareto points show it.
"""

from __future__ import annotations

import itertools
import math
import statistics

import torch
from common import ROOT, options, progress, table, verdict
from scipy.stats import spearmanr

import roundoff as ro
from roundoff.budget import Budget
from roundoff.errors import RoundoffError
from roundoff.train import TunedRun, gradients_of, sqnr
from roundoff.workload import Workload

BAR_EQUAL, BAR_MORE = 3.0, 10.0


def gpt2() -> Workload:
    """Next-token loss on random text of the example's model."""
    base = Workload.load(ROOT / "examples" / "gpt2.py")

    def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
        )

    batches = [
        {"input_ids": b["input_ids"][i : i + 4]} for b in base.batches for i in (0, 4)
    ]
    return Workload(
        base.model,
        batches,
        forward=base.forward,
        loss=loss,
        optimizer=adamw,
        name="gpt2",
    )


def resnet18() -> Workload:
    """Classification of noise images with the example's model."""
    base = Workload.load(ROOT / "examples" / "resnet18.py")
    labels = torch.Generator().manual_seed(5)
    batches = [
        (b[i : i + 8], torch.randint(0, 10, (8,), generator=labels))
        for b in base.batches
        for i in (0, 8)
    ]
    return Workload(
        base.model,
        batches,
        forward=lambda model, batch: model(batch[0]).logits,
        loss=lambda logits, batch: torch.nn.functional.cross_entropy(logits, batch[1]),
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9
        ),
        name="resnet18",
    )


def minilm() -> Workload:
    """Fine-tuning by regression: the cosine of two sentences is to be the share of the words that they have in common."""
    base = Workload.load(ROOT / "examples" / "minilm.py")

    def loss(vectors: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["input_ids"]
        words = torch.zeros(len(ids), int(ids.max()) + 1).scatter_(1, ids, 1.0)
        words[:, :104] = 0  # special tokens and padding
        common = words @ words.T
        wanted = common / (words.sum(1) + words.sum(1, keepdim=True) - common)
        return torch.nn.functional.mse_loss(vectors @ vectors.T, wanted)

    batches = [
        {k: v[i : i + 8] for k, v in b.items()} for b in base.batches for i in (0, 8)
    ][:4]
    return Workload(
        base.model,
        batches,
        forward=base.forward,
        loss=loss,
        optimizer=adamw,
        name="minilm",
    )


def ranked(workload: Workload, budget: Budget, most: int = 90) -> tuple[object, ...]:
    """Spearman rank correlation, and dB apart, of sites rounded alone; every so many of a large model's."""
    sites = [
        s.site for s in budget.sites if budget.rows(s.site, "bf16") and not s.no_path
    ]
    batches = budget.about.samples
    reference, found = gradients_of(workload, batches=batches), []
    for site in sites[:: -(-len(sites) // most)]:
        measured = sqnr(
            gradients_of(workload, {site: "bf16"}, batches=batches), reference
        )
        if math.isfinite(measured):
            found.append((budget.predict({site: "bf16"}).db, measured))
    off = [abs(a - b) for a, b in found]
    rho = spearmanr([a for a, _ in found], [b for _, b in found]).statistic
    return len(found), f"{rho:.3f}", f"{statistics.median(off):.2f}", f"{max(off):.2f}"


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


WORKLOADS = {"gpt2": gpt2, "resnet18": resnet18, "minilm": minilm}


#: Formats offered, and the costs to tune by. fp16 costs what bf16 does, is eight times more exact, and needs a loss scale.
CASES = {
    ("bf16",): ("bytes", "bitops", "operators"),
    ("bf16", "fp16"): ("bytes", "bitops"),
}


def native(run: TunedRun) -> str:
    return "–" if run.native_db is None else f"{run.native_db:.1f}"


def main() -> None:
    args = options(__doc__)
    torch.set_num_threads(
        1
    )  # many small operators: two threads only wait for each other
    rows: list[tuple[object, ...]] = []
    points: list[tuple[object, ...]] = []
    ranks: list[tuple[object, ...]] = []
    for name in args.only or (list(WORKLOADS)[:1] if args.quick else WORKLOADS):
        try:
            workload = WORKLOADS[name]()
        except RoundoffError as error:
            print(f"\n{name} is left out: {str(error).splitlines()[0]}")
            continue
        budgets: dict[tuple[str, ...], Budget] = {}
        for formats, costs in CASES.items():
            for device, cost in itertools.product(
                ("cpu", "cuda"), costs[:1] if args.quick else costs
            ):
                found = ro.tune(
                    workload,
                    formats,
                    device=device,
                    cost=cost,
                    budget=budgets.get(formats),
                    steps=2,
                    batches=1 if args.quick else 4,
                )
                budgets.setdefault(formats, found.budget)
                by = {run.name: run for run in found.runs}
                base, more = by["autocast"], by["more"]
                equal = max(
                    (by[n] for n in ("equal", "mended") if n in by),
                    key=lambda run: run.measured_db,
                )
                gain, further = (
                    equal.measured_db - base.measured_db,
                    more.measured_db - base.measured_db,
                )
                rows.append(
                    (
                        name,
                        "+".join(formats),
                        device,
                        cost,
                        f"{base.measured_db:.1f}",
                        native(base),
                        base.fp32_operators,
                        f"{equal.predicted_db:.1f}",
                        f"{equal.measured_db:.1f}",
                        native(equal),
                        equal.fp32_operators,
                        f"{gain:+.1f}",
                        verdict(gain, BAR_EQUAL),
                        f"{100 * (more.cost / base.cost - 1) if base.cost else 0:+.0f} %",
                        f"{more.measured_db:.1f}",
                        f"{further:+.1f}",
                        verdict(further, BAR_MORE),
                    )
                )
                points += [
                    (
                        name,
                        "+".join(formats),
                        device,
                        cost,
                        f"{100 * p.of_fp32:.0f} %",
                        f"{100 * p.cost / base.cost:.0f} %" if base.cost else None,
                        "exact" if p.predicted_db is None else f"{p.predicted_db:.1f}",
                        p.fp32_operators,
                    )
                    for p in found.pareto
                ]
                progress(f"{name} {formats} {device} {cost}")
        ranks.append((name, *ranked(workload, budgets["bf16",])))
    header: tuple[str, ...] = (
        "workload",
        "formats",
        "lists of",
        "cost",
        "autocast",
        "native",
        "in fp32",
        "plan predicted",
        "measured",
        "native",
        "in fp32",
        "gain",
        "bar +3",
        "cost",
        "plan at more",
        "gain",
        "bar +10",
    )
    table(
        "Gradient SQNR, dB, at the cost of autocast and at up to 20 % more",
        header,
        rows,
    )
    header = (
        "workload",
        "sites tried",
        "rank correlation",
        "median dB off",
        "max dB off",
    )
    table(
        "Each site alone in bf16: gradient SQNR predicted against measured",
        header,
        ranks,
    )
    header = (
        "workload",
        "formats",
        "lists of",
        "cost",
        "of fp32",
        "of autocast",
        "SQNR, dB",
        "operators in fp32",
    )
    table("Pareto points (predicted)", header, points)


if __name__ == "__main__":
    main()
