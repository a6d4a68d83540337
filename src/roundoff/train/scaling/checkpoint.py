"""A scaler's state in a checkpoint: with the keys of ``torch.amp.GradScaler``, so that
one can go on from the other.
"""

from __future__ import annotations

import math
from typing import Any

from roundoff.errors import ScalerError
from roundoff.train.scaling.scale_rules import Rule, ScaleState, parse_rule

_WHERE = "LossScaler.load_state_dict"


def saved(
    rule: Rule, start: dict[str, Any], state: ScaleState | None
) -> dict[str, Any]:
    """Return the state as plain numbers; ``start`` stands for one that is not on a device yet."""
    now = start
    if state is not None:
        now = {
            "scale": float(state.scale),
            "good": int(state.good),
            "bad": int(state.bad),
            "stuck": int(state.stuck),
        }
    return {
        "scale": now["scale"],
        **rule.constants(),
        "_growth_tracker": now.get("good", 0),
        "rule": rule.name,
        "bad_steps": now.get("bad", 0),
        "stuck": now.get("stuck", 0),
    }


def loaded(rule: Rule, state: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    """Return the rule to go on with, and the state to start from.

    The dynamic rule takes the constants of the checkpoint, as torch does. Raises
    ``ScalerError`` where the checkpoint holds no scale, or one of no use or of another
    rule.
    """
    if "scale" not in state:
        raise ScalerError(
            "the checkpoint holds no loss scale: was it saved by a disabled scaler?",
            where=_WHERE,
            expected="scale, _growth_tracker, ...",
            got=", ".join(state) or "an empty dict",
        )
    scale = float(state["scale"])
    saved_rule = state.get("rule", "dynamic")
    if not 0 < scale < math.inf:
        raise ScalerError(
            "the checkpoint's loss scale is of no use",
            where=_WHERE,
            expected="a positive number",
            got=f"{scale:g}",
            do="start with a new LossScaler, and see why every step was skipped before it",
        )
    if saved_rule != rule.name:
        raise ScalerError(
            "the checkpoint is of another rule",
            where=_WHERE,
            expected=rule.name,
            got=str(saved_rule),
            do=f"LossScaler(rule={saved_rule!r})",
        )
    if rule.name == "dynamic":
        constants = {key: state[key] for key in rule.constants() if key in state}
        rule = parse_rule("dynamic", {"init_scale": rule.init_scale, **constants})
    return rule, {
        "scale": scale,
        "good": int(state.get("_growth_tracker", 0)),
        "bad": int(state.get("bad_steps", 0)),
        "stuck": int(state.get("stuck", 0)),
    }
