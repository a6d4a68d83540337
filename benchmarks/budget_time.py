"""How long does a budget take, against trying one site at a time?

The baseline is what one would write by hand: for each row that the budget reports, round that site (or that parameter)
alone, evaluate all batches without gradients, and take the noise of the output. It is made as fast as is reasonable:
hooks only on the module that owns the site, one comparison for each call inside it, weights rounded once for all
batches, the reference computed once, a parameter's rounded values swapped in with nothing intercepted at all.
A random sample of trials (fixed seed) is timed, interleaved with budgets and plain forwards, and multiplied by the number
of rows. Bar: at least 30 times on MiniLM.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from common import FORMATS, clock, middle, options, progress, table, verdict, workloads
from one_site import Target, find_sites, rounding_alone

import roundoff as ro
from roundoff.formats import PerAxis, parse_format, round_tensor
from roundoff.ops import round_rows
from roundoff.workload import Workload, target_tensors

BAR = 30.0


def main() -> None:
    args = options(__doc__)
    rounds, size = (1, 2) if args.quick else (5, 20)
    rows = []
    for name, workload in workloads(args, ("minilm", "digits", "gpt2", "resnet18")):
        budget = ro.budget(workload, FORMATS)  # also the warm-up
        targets = find_sites(workload)
        reference = _evaluate(workload)
        sites = [
            (s, f)
            for s, f in zip(budget.table["site"], budget.table["format"], strict=True)
        ]
        params = [
            (p, f)
            for p, f in zip(
                budget.parameters["parameter"], budget.parameters["format"], strict=True
            )
        ]
        draw = random.Random(0)
        times: dict[str, list[list[tuple[float, float]]]] = {
            k: [] for k in ("budget", "plain", "site", "param")
        }
        for number in range(rounds):
            one = (
                draw.sample(sites, min(size, len(sites))),
                draw.sample(params, min(size, len(params))),
            )
            times["budget"].append([clock(lambda: ro.budget(workload, FORMATS))])
            times["plain"].append(
                [clock(lambda: _evaluate(workload)) for _ in range(3)]
            )
            times["site"].append(
                [
                    clock(partial(_site_trial, workload, reference, targets, *pair))
                    for pair in one[0]
                ]
            )
            times["param"].append(
                [
                    clock(partial(_param_trial, workload, reference, targets, *pair))
                    for pair in one[1]
                ]
            )
            progress(f"{name}: round {number + 1} of {rounds}")
        for clock_name, which in (("CPU", 1), ("wall", 0)):
            rows.append(
                _row(name, clock_name, which, times, len(sites), len(params), budget)
            )
    table(
        f"Time of one budget of {len(FORMATS)} formats; ratios: median of rounds (range)",
        (
            "workload",
            "clock",
            "probes",
            "rows",
            "budget / plain forward",
            "trial / plain forward",
            "operator sites: trials / budget",
            f"bar {BAR:.0f}",
            "parameters",
            "sites + parameters: trials / budget",
            f"bar {BAR:.0f}",
        ),
        rows,
    )


def _row(
    name: str,
    label: str,
    which: int,
    times: dict[str, list[list[tuple[float, float]]]],
    sites: int,
    params: int,
    budget: ro.Budget,
) -> tuple[object, ...]:
    mean = {
        k: [statistics.fmean(t[which] for t in ts) for ts in rounds]
        for k, rounds in times.items()
    }
    turns = list(
        zip(mean["budget"], mean["plain"], mean["site"], mean["param"], strict=True)
    )
    alone = [sites * s / b for b, _, s, _ in turns]
    both = [(sites * s + params * q) / b for b, _, s, q in turns]
    trials = [t[which] for ts in times["site"] for t in ts]
    error = statistics.stdev(trials) / len(trials) ** 0.5 / statistics.fmean(trials)
    return (
        name,
        label,
        budget.about.probes,
        sites,
        middle([b / p for b, p, _, _ in turns]),
        f"{middle([s / p for _, p, s, _ in turns])} ± {100 * error:.0f} %",
        middle(alone),
        verdict(statistics.median(alone), BAR),
        params,
        middle(both),
        verdict(statistics.median(both), BAR),
    )


def _evaluate(
    workload: Workload, begin: Callable[[], None] = lambda: None
) -> list[dict[str, torch.Tensor]]:
    found = []
    with torch.no_grad():
        for batch in workload.batches:
            begin()
            found.append(target_tensors(workload.run(batch), None))
    return found


def _noise(
    found: list[dict[str, torch.Tensor]], reference: list[dict[str, torch.Tensor]]
) -> float:
    error = sum(
        float((f[k] - r[k]).square().sum())
        for f, r in zip(found, reference, strict=True)
        for k in r
    )
    return error / sum(float(t.square().sum()) for r in reference for t in r.values())


def _site_trial(
    workload: Workload,
    reference: list[dict[str, torch.Tensor]],
    targets: dict[str, Target],
    site: str,
    fmt: str,
) -> float:
    with rounding_alone(workload.model, targets[site], parse_format(fmt)) as mode:
        return _noise(_evaluate(workload, mode.begin), reference)


def _param_trial(
    workload: Workload,
    reference: list[dict[str, torch.Tensor]],
    targets: dict[str, Target],
    name: str,
    fmt: str,
) -> float:
    with _rounded_parameter(workload.model, targets, name, fmt):
        return _noise(_evaluate(workload), reference)


@contextmanager
def _rounded_parameter(
    model: torch.nn.Module, targets: dict[str, Target], name: str, fmt: str
) -> Iterator[None]:
    """The parameter's values rounded in place; of a looked-up table, whose rows are few, the rows that come out."""
    parameter, chosen = model.get_parameter(name), parse_format(fmt)
    owner = model.get_submodule(name.rpartition(".")[0])
    uses = sum(
        p is parameter for _, p in model.named_parameters(remove_duplicate=False)
    )
    if isinstance(owner, torch.nn.Embedding) and uses == 1:
        handle = owner.register_forward_hook(
            lambda _m, _i, rows: round_rows(rows, chosen)
        )
        yield
        handle.remove()
        return
    rule = chosen.execution
    channel = next(
        (
            o.channel
            for t in targets.values()
            for o in t.template.operands
            if o.sources == {name}
        ),
        0,
    )
    scaled = rule is not None and rule.weight == "channel"
    exact = parameter.data
    parameter.data = round_tensor(
        exact, chosen, granularity=PerAxis(channel % exact.ndim) if scaled else None
    )
    yield
    parameter.data = exact


if __name__ == "__main__":
    main()
