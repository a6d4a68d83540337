"""All rules, in the order of their codes."""

from __future__ import annotations

from roundoff.lint.rule import Rule
from roundoff.lint.rules import (
    autocast,
    cancellation,
    formulas,
    loop,
    losses,
    low_precision,
    paddle,
    pipeline,
    scaler,
    tensorflow,
    tensorflow_losses,
)

#: A theme each; the first digit of a code says which.
THEMES = {
    "RO1": "loss scaling",
    "RO2": "autocast",
    "RO3": "state in low precision",
    "RO4": "formulas",
    "RO5": "loss and activation",
    "RO6": "training loop",
    "RO7": "input pipeline and device transfer",
    "RO8": "Paddle",
    "RO9": "TensorFlow",
}

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            *autocast.RULES,
            *cancellation.RULES,
            *formulas.RULES,
            *loop.RULES,
            *losses.RULES,
            *low_precision.RULES,
            *paddle.RULES,
            *pipeline.RULES,
            *scaler.RULES,
            *tensorflow.RULES,
            *tensorflow_losses.RULES,
        ),
        key=lambda rule: rule.code,
    )
)
