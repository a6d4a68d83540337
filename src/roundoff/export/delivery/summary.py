"""summary: everything that was asked, made, measured and refused, as plain data for the report."""

from __future__ import annotations

import math
from typing import Any

import torch

from roundoff.export.delivery.judge import size
from roundoff.export.delivery.make import Made
from roundoff.export.delivery.request import Ask
from roundoff.export.delivery.sites import site_rows
from roundoff.export.delivery.storage import stored_bytes
from roundoff.export.delivery.tradeoff import chosen
from roundoff.export.onnx.proof import Proof
from roundoff.ops import MULTIPLYING_KINDS
from roundoff.packages import installed_version
from roundoff.plan import UNITS
from roundoff.quantize import average_bits, model_cost


def summarize(made: Made, ask: Ask) -> dict[str, Any]:
    """The answer as a dictionary of strings, numbers, lists and None; proof, files and trade-off are added by ``folder``."""
    rows = site_rows(made, ask)
    own = made.workload
    graph = made.model.graph
    weight_bits, value_bits = (_none(bits) for bits in average_bits(made.model))
    goal, judged, judge = ask.goal, made.judged, made.judge
    states = [row["state"] for row in rows]
    drop = (
        None
        if judged.metric is None or judge.metric is None
        else judge.metric - judged.metric
    )
    return {
        "version": installed_version(),
        "workload": own.name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "asked": {
            "target": goal.text if goal else None,
            "kind": goal.kind if goal else None,
            "value": goal.value if goal else None,
            "formats": list(ask.formats) if ask.plan is None else [],
            "plan": ask.plan is not None,
            "prune": ask.prune,
            "cost": UNITS[ask.cost],
            "skip": list(ask.skip),
            "pin": dict(ask.pin),
            "qat": ask.qat,
            "epochs": ask.epochs,
            "observer": ask.rounding.observer,
            "weights": ask.rounding.weights,
        },
        "calibration": {
            "batches": len(own.batches),
            "samples": sum(size(b) for b in own.batches),
        },
        "judged_on": {
            "batches": len(judge.workload.batches),
            "samples": judge.samples,
            "held_out": bool(own.held_out),
        },
        "result": {
            "met": made.met(ask),
            "sqnr_db": judged.db,
            "agreement": judged.agreement,
            "metric_name": own.metric_name,
            "metric_reference": judge.metric,
            "metric": judged.metric,
            "drop": drop,
        },
        "sites": rows,
        "coverage": {
            "sites": len(rows),
            **{name: states.count(name) for name in ("quantized", "codes", "fp32")},
            "products": sum(r["kind"] in MULTIPLYING_KINDS for r in rows),
            "products_quantized": sum(
                r["kind"] in MULTIPLYING_KINDS and r["state"] == "quantized"
                for r in rows
            ),
            "excluded": [
                {"operator": e.operator, "reason": e.reason, "count": e.count}
                for e in graph.excluded
            ],
        },
        "formats": _formats(rows),
        "bits": {"weight": weight_bits, "value": value_bits},
        "weights": {
            "bytes": stored_bytes(made.model),
            "fp32": model_cost(own.model, own.batches[0], forward=own.forward).bytes,
        },
        "chosen": chosen(made),
        "steps": [
            {
                "name": s.name,
                "before": _none(s.before),
                "after": _none(s.after),
                "note": s.note,
            }
            for s in made.model.steps
        ],
        "trials": made.trials,
        "pruned": made.pruned,
        "pruning": made.pruning,
        "tradeoff": [],
        "proof": None,
        "files": [],
        "notes": made.notes,
        "lost": [],
        "seconds": made.seconds,
    }


def add_proof(summary: dict[str, Any], proof: Proof) -> None:
    """Put what ONNX Runtime did into a summary, and beside the sites that it is about."""
    raced = proof.latency
    summary["proof"] = {
        "samples": proof.samples,
        "metric": proof.metric,
        "metric_fp32": proof.metric_fp32,
        "agreement": proof.agreement,
        "sqnr_db": proof.sqnr_db,
        "simulation_db": proof.simulation_db,
        "codes": proof.codes,
        "differing": proof.differing,
        "kernels": dict(proof.kernels.integer),
        "operators": dict(proof.kernels.counts),
        "latency": None
        if raced is None
        else {
            "reference": raced.reference,
            "candidate": raced.candidate,
            "ratio": raced.ratio,
            "quartiles": list(raced.quartiles),
            "runs": raced.runs,
        },
        "bytes": proof.bytes,
        "bytes_fp32": proof.bytes_fp32,
        "notes": [
            {"name": name, "reason": reason} for name, reason in proof.notes.items()
        ],
    }
    values, calls = {s.name: s for s in proof.sites}, {s.site: s for s in proof.became}
    for row in summary["sites"]:
        value, call = values.get(row["site"]), calls.get(row["site"])
        own = value.own if value else None
        row |= {
            "file_db": value.fp32_db if value else None,
            "artefact_db": value.simulation_db if value else None,
            "codes": own.most if own else None,
            "differing": own.share if own else None,
            "carried": value.carried.share if value and value.carried else None,
            "kernel": call.kernel if call else "",
            "integer": call.integer if call else None,
            "kernel_reason": call.reason if call else "",
        }


#: Kinds of calls that multiply.


def _formats(rows: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        if row["state"] == "quantized":
            found[row["format"]] = found.get(row["format"], 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _none(value: float) -> float | None:
    return None if math.isnan(value) else value
