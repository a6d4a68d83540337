"""What ``roundoff quantize`` made, as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

Row = Mapping[str, Any]


def verdict(data: Row) -> str:
    """Whether the target is met, with what was asked and measured."""
    result, asked = data["result"], data["asked"]
    name = result["metric_name"]
    fall = ""
    if name is not None:
        fall = f"{name} {metric(result['metric'])}, {fell(result['drop'])} {metric(result['metric_reference'])} in fp32"
    noise = f"{db(result['sqnr_db'])} dB"
    if asked["target"] is None:
        return f"Quantized: {fall or noise}."
    met = "The target is met" if result["met"] else "The target is missed"
    if asked["kind"] == "db":
        return f"{met}: {noise}, {asked['target']} asked."
    return f"{met}: {fall}; at most {asked['target']} less asked."


def fell(drop: float | None) -> str:
    """How a metric stands to that of fp32.

    >>> fell(0.004), fell(-0.001), fell(0.0)
    ('0.004 below', '0.001 above', 'equal to')
    """
    if drop is None:
        return NONE
    shown = f"{abs(drop):.2g}"
    return (
        "equal to"
        if abs(drop) < 1e-12
        else f"{shown} below"
        if drop > 0
        else f"{shown} above"
    )


def answer(data: Row) -> list[str]:
    """The verdict, then what is quantized, how exact, how large and how fast; ``data`` is ``summary.json``."""
    result, coverage, proof = data["result"], data["coverage"], data["proof"]
    said = [verdict(data)]
    kinds = listing([f"{number} in {name}" for name, number in data["formats"].items()])
    done = f"{coverage['products_quantized']} of {count(coverage['products'], 'product')} are quantized"
    said.append(f"{done} ({kinds}){bits(data['bits'])}." if kinds else f"{done}.")
    where = f"{count(data['judged_on']['samples'], 'sample')}{' held out' if data['judged_on']['held_out'] else ''}"
    same = (
        ""
        if result["agreement"] is None
        else f", the same first choice as fp32 for {percent(result['agreement'])}"
    )
    said.append(f"On {where}: SQNR of the output {db(result['sqnr_db'])} dB{same}.")
    if data["pruning"]:
        said.append(pruned(data))
    weights = data["weights"]
    said.append(
        f"Weights take {size(weights['bytes'])}, {percent(ratio(weights['bytes'], weights['fp32']))} of fp32's."
    )
    if proof is not None:
        said += _proved(data)
    else:
        why = next(
            (f["reason"] for f in data["files"] if f["name"] == "model.onnx"), ""
        )
        if why and not why.startswith("--"):
            said.append(f"model.onnx could not be made, all else is simulated: {why}.")
    return said


def pruned(data: Row) -> str:
    """What pruning left, against the whole model in fp32.

    >>> both = {"before": 2_000_000, "after": 1_000_000}
    >>> pruned({"asked": {"prune": "channel:0.3"}, "pruning": {"macs": both, "bytes": both, "time": 0.6}})
    'Pruned (channel:0.3): 50.0% of the multiply-accumulates, 1.00 MB of 2.00 MB, 0.60× the time in PyTorch, all in fp32.'
    >>> same = {"before": 9_000, "after": 9_000}
    >>> pruned({"asked": {"prune": "2:4"}, "pruning": {"macs": same, "bytes": same, "time": 1.01}})
    'Pruned (2:4): zeros in their places; ordinary kernels do the same work (1.01× the time in PyTorch, 9 kB as before).'
    """
    found = data["pruning"]
    macs, stored, took = (
        found["macs"],
        found["bytes"],
        f"{times(found['time'])} the time in PyTorch",
    )
    how = f"Pruned ({data['asked']['prune']})"
    if stored["after"] == stored["before"] and macs["after"] == macs["before"]:
        same = f"{took}, {size(stored['after'])} as before"
        return (
            f"{how}: zeros in their places; ordinary kernels do the same work ({same})."
        )
    left = (
        f"{percent(ratio(macs['after'], macs['before']))} of the multiply-accumulates"
    )
    return f"{how}: {left}, {size(stored['after'])} of {size(stored['before'])}, {took}, all in fp32."


def _proved(data: Row) -> list[str]:
    proof = data["proof"]
    kernels = (
        listing([f"{number} {name}" for name, number in proof["kernels"].items()])
        or "no integer kernel"
    )
    said = [
        f"model.onnx is {size(proof['bytes'])}, {percent(ratio(proof['bytes'], proof['bytes_fp32']))} of fp32's."
    ]
    fast = proof["latency"]
    if fast is not None:
        said.append(
            f"ONNX Runtime runs it {times(fast['ratio'])} as fast as fp32 (in turns, one thread): {kernels}."
        )
    else:
        said.append(f"ONNX Runtime runs {kernels}.")
    if all(row["codes"] is None for row in data["sites"]):
        apart = "there are no codes of values to compare"
    elif proof["codes"]:
        apart = f"codes differ by {proof['codes']} at most, {percent(proof['differing'])} of them where most do"
    else:
        apart = "every code is equal"
    said.append(
        f"Against the simulation {apart}; its output is {db(proof['simulation_db'])} dB from it."
    )
    rounds = {
        f"{row['kernel_reason']}."
        for row in data["sites"]
        if row["integer"] and row["kernel"] == "MatMulNBits"
    }
    said += sorted(rounds)
    return said


def bits(average: Row) -> str:
    """Average widths, as the end of a sentence.

    >>> bits({"weight": 4.96, "value": 8.0}), bits({"weight": None, "value": None})
    (', 5.0 bits a weight and 8.0 a value they read', '')
    """
    if average["weight"] is None or average["value"] is None:
        return ""
    return f", {average['weight']:.1f} bits a weight and {average['value']:.1f} a value they read"


def size(number: int | None) -> str:
    """Bytes, decimal.

    >>> size(295_000), size(1_200_000), size(None)
    ('295 kB', '1.20 MB', '–')
    """
    if number is None:
        return NONE
    if number < 1000:
        return f"{number} B"
    return f"{number / 1e6:.2f} MB" if number >= 1e6 else f"{number / 1e3:.0f} kB"


def weakest(data: Row, top: int = 10) -> list[Row]:
    """The sites that cost the output most, by their share of the noise that the budget predicts.

    Without a budget (no target) those whose results are furthest from fp32. Sites without the one or the other are left out.
    """
    if ranked(data):
        costly = [row for row in data["sites"] if row["share"]]
        return sorted(costly, key=lambda row: -float(row["share"]))[:top]
    known = [row for row in data["sites"] if finite(row["sqnr_db"])]
    return sorted(known, key=lambda row: float(row["sqnr_db"]))[:top]


def ranked(data: Row) -> bool:
    """Whether a budget says what each site costs the output."""
    return any(row.get("share") is not None for row in data["sites"])


#: What the SQNR of sites is measured against.
AGAINST = "SQNR of what a site returns, against fp32 with channels scaled alike"


def left(data: Row) -> list[tuple[str, list[str]]]:
    """Reason -> sites that stay in fp32, those that multiply first, then by number."""
    found: dict[str, list[str]] = {}
    for row in data["sites"]:
        if row["state"] == "fp32":
            found.setdefault(row["reason"], []).append(row["site"])
    products = {
        row["site"] for row in data["sites"] if row["kind"] in MULTIPLYING_KINDS
    }
    order = sorted(
        found.items(), key=lambda item: (not products & set(item[1]), -len(item[1]))
    )
    return [(why, sites) for why, sites in order]


def slow(data: Row) -> list[Row]:
    """The quantized sites that ONNX Runtime does not run with integers, with the reason."""
    return [
        row
        for row in data["sites"]
        if row.get("integer") is False and row["state"] != "fp32"
    ]


def trials(data: Row) -> list[dict[str, str]]:
    """What the search of the target measured."""
    return [
        {
            "trial": str(index + 1),
            "formats": listing([f"{n} {f}" for f, n in t["sites"].items()]) or "none",
            "predicted": db(t["predicted_db"]),
            "measured": db(t["measured_db"]),
            "metric": metric(t["metric"]),
            data["asked"]["cost"]: NONE if t["cost"] is None else f"{t['cost']:.4g}",
        }
        for index, t in enumerate(data["trials"])
    ]
