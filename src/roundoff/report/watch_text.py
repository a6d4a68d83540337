"""What ``roundoff watch`` prints of a training, a line for each event; ``event.to_dict()`` is what it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roundoff.report.figures import count, percent

Row = Mapping[str, Any]
_WHERE = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "loss": "outside of the model, in the loss",
    "data": "before the step, in the data",
    "weights": "before the step, in the weights",
}


def step_line(step: Row) -> str:
    """One step.

    >>> step_line({"step": 7, "loss": 2.31456, "loss_scale": 32768.0, "gradient_norm": 1.25, "non_finite": 0.125,
    ...            "skipped": True, "skips": 2, "lr": 0.001})
    'step 7  loss 2.3146  scale 32768  skips 2  gradients 1.25, 12.5% NaN or Inf  lr 0.001  skipped'
    """
    parts = [f"step {step['step']}"]
    if step["loss"] is not None:
        parts.append(f"loss {step['loss']:.5g}")
    if step["loss_scale"] is not None:
        parts.append(f"scale {step['loss_scale']:.10g}")
        parts.append(f"skips {step['skips']}")
    if step["gradient_norm"] is not None:
        bad = (
            f", {percent(step['non_finite'])} NaN or Inf" if step["non_finite"] else ""
        )
        parts.append(f"gradients {step['gradient_norm']:.3g}{bad}")
    if step["lr"] is not None and math.isfinite(step["lr"]):
        parts.append(f"lr {step['lr']:.3g}")
    return "  ".join(parts + ["skipped"] * step["skipped"])


def trouble_lines(trouble: Row) -> list[str]:
    """Why the gradients of a step were not finite: the headline, then what is known, indented."""
    what = (
        f"step {trouble['step']} skipped at loss scale {trouble['scale']:g}"
        if trouble["skipped"]
        else f"step {trouble['step']}: the optimizer gets gradients that are not finite"
    )
    lines = [what]
    if trouble["first"]:
        lines.append(f"first not finite: {trouble['first']}")
    if trouble["gradient"]:
        made = f", made by {trouble['made_by']}" if trouble["made_by"] else ""
        lines.append(f"first parameter in backward order: {trouble['gradient']}{made}")
    if trouble["phase"]:
        where, line = (
            _WHERE[trouble["phase"]],
            f" ({trouble['line']})" if trouble["line"] else "",
        )
        place = (
            f"at {trouble['origin']}, "
            if trouble["origin"] and trouble["origin"] != trouble["made_by"]
            else ""
        )
        lines.append(
            f"{'born' if trouble['born'] else 'inherited: born'} {place}{where}{line}"
        )
    lines += [trouble["cause"]] if trouble["cause"] else []
    lines += [f"try: {trouble['advice']}"] if trouble["advice"] else []
    return [lines[0], *(f"  {line}" for line in [*lines[1:], *trouble["notes"]])]


def advice_line(advice: Row) -> str:
    """A fault of the loop.

    >>> advice_line({"step": 3, "rule": "no-gradients", "text": "no parameter of SGD has a gradient"})
    'step 3 [no-gradients]: no parameter of SGD has a gradient'
    """
    return f"step {advice['step']} [{advice['rule']}]: {advice['text']}"


def end_line(end: Row) -> str:
    """The last line.

    >>> end_line({"steps": 1200, "skips": 1, "loss_scale": 1024.0, "trouble": None})
    '1,200 steps, 1 skip, loss scale 1024: it ended well'
    """
    parts = [count(end["steps"], "step")]
    if end["loss_scale"] is not None:
        parts += [count(end["skips"], "skip"), f"loss scale {end['loss_scale']:.10g}"]
    return f"{', '.join(parts)}: {end['trouble'] or 'it ended well'}"
