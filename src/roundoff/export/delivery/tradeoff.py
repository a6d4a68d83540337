"""tradeoff: the same model in each usual format alone, beside what was chosen: accuracy against size and work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from roundoff.errors import RoundoffError
from roundoff.export.delivery.judge import Judged
from roundoff.export.delivery.make import Made, whole_plan
from roundoff.export.delivery.request import Ask
from roundoff.export.delivery.storage import stored_bytes, work
from roundoff.quantize import model_cost, quantize

#: Formats that are tried, one run each.
CANDIDATES = ("int8", "w6a8", "w4a8", "w4a4", "w8", "w4", "fp8_e4m3fn", "mxfp4")


def tradeoff(
    made: Made, ask: Ask, progress: Callable[[str, int, int], None] | None = None
) -> list[dict[str, Any]]:
    """A row for fp32, for each of ``CANDIDATES`` and the formats asked for, and for what was chosen (``chosen``).

    ``bytes`` of weights as stored, ``work``: bit operations relative to fp32 (a cost model, no measurement), ``db`` and
    ``metric`` from the simulation. A format that cannot be run has a ``reason`` instead. Candidates are neither pruned nor
    trained.
    """
    own = made.workload
    counted = model_cost(own.model, own.batches[0], forward=own.forward)
    rows = [
        _row("fp32", counted.bytes, 1.0, Judged(float("inf"), made.judge.metric, 1.0))
    ]
    names = list(dict.fromkeys((*ask.formats, *CANDIDATES)))
    plain = replace(
        ask,
        formats=("int8",),
        plan=None,
        target=None,
        pin={},
        skip=(),
        prune="",
        qat=False,
        epochs=0,
        distill=False,
    )
    for index, name in enumerate(names):
        if progress is not None:
            progress("formats", index, len(names))
        try:
            plan = whole_plan(own, name, plain)
            model = quantize(
                own, plan, options=ask.options, rounding=ask.rounding, fold=ask.fold
            )
        except RoundoffError as error:
            rows.append({**_row(name, None, None, None), "reason": error.what})
            continue
        formats = {row.site: row.format for row in model.rows if row.format != "codes"}
        rows.append(
            _row(
                name,
                stored_bytes(model),
                work(formats, counted.by_site),
                made.judge.judge(model),
            )
        )
    if progress is not None:
        progress("formats", len(names), len(names))
    return [*rows, chosen(made)]


def chosen(made: Made) -> dict[str, Any]:
    """The row of the model that was made."""
    counted = model_cost(
        made.model.model, made.workload.batches[0], forward=made.workload.forward
    )
    formats = {row.site: row.format for row in made.model.rows if row.format != "codes"}
    share = work(formats, counted.by_site)
    macs = made.pruning.get("macs")
    if share is not None and macs and macs["before"]:
        share *= macs["after"] / macs["before"]
    return _row("chosen", stored_bytes(made.model), share, made.judged)


def _row(
    name: str, size: int | None, share: float | None, judged: Judged | None
) -> dict[str, Any]:
    return {
        "name": name,
        "bytes": size,
        "work": share,
        "db": None if judged is None else judged.db,
        "metric": None if judged is None else judged.metric,
        "agreement": None if judged is None else judged.agreement,
        "reason": "",
    }
