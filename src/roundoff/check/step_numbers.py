"""Numbers of each step: learning rates, accumulation, clipping, loss scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from roundoff.check.findings import NOTE, Difference
from roundoff.check.pair import Pair, number, same_number
from roundoff.check.rules import ANY, HYPER_PARAMETERS, SCALING, Rule

_RATE = "learning rate"
_BACKWARD = "backward passes"
#: The schedule that goes by what was trained before.
_BY_METRIC = "ReduceLROnPlateau"
#: Number of a step -> how a difference is judged.
_RULES = {
    _BACKWARD: Rule(
        group=HYPER_PARAMETERS,
        name="backward passes of an optimizer step",
        why="gradients are gathered over another number of batches: another effective "
        "batch, and gradients of another size where the loss is not divided by it",
        fix="accumulate over as many batches in both programs",
    ),
    "max_norm of clipping": Rule(
        group=HYPER_PARAMETERS,
        name="clipping of gradient norms",
        why="large gradients are scaled down to another size",
        fix="clip both to the same norm, at the same place",
        follows=("clipping",),
    ),
    "clip_value of clipping": Rule(
        group=HYPER_PARAMETERS,
        name="clipping of gradient values",
        why="large gradients are cut at another value",
        fix="clip both at the same value, at the same place",
        follows=("clipping",),
    ),
    "clipped after unscaling": Rule(
        group=HYPER_PARAMETERS,
        name="clipping after unscale_",
        why="scaled gradients are clipped by a limit that is meant for unscaled ones, "
        "which makes updates smaller by the loss scale",
        fix="call scaler.unscale_(optimizer) before clipping",
    ),
    "loss scale": Rule(
        group=SCALING,
        name="loss scale",
        why="other gradients underflow, and other steps are skipped",
        fix="give both GradScalers the same settings",
        follows=("growth interval", "growth factor", "backoff factor"),
    ),
    "gradients of the step before": Rule(
        group=HYPER_PARAMETERS,
        name="clearing of gradients",
        why="gradients that are not cleared by zero_grad() are added to those of the "
        "next step",
        fix="call optimizer.zero_grad() once after each optimizer step",
    ),
}
_RATES = Rule(
    group=HYPER_PARAMETERS,
    name=_RATE,
    why="every update of the weights has another size",
    fix="give both optimizers and schedules the same rates",
)
_OTHER_SCHEDULE = "the schedules differ: from there on updates have another size"
_LENGTH = Rule(
    group=HYPER_PARAMETERS,
    name="number of steps",
    severity=NOTE,
    why="one of them trains longer; the steps that both have are compared",
    fix="nothing, where that is meant",
    follows=(
        "batch size",
        "samples",
        "sampler",
        "drop_last",
        "backward passes of an optimizer step",
        "processes",
    ),
)


def differing_numbers(pair: Pair) -> Iterator[Difference]:
    """Yield the numbers of steps that differ, each where it does first."""
    ours, theirs = (side.numbers for side in pair.sides)
    if not ours or not theirs:
        return
    for name in sorted({*ours, *theirs}):
        rule = _RATES if name.startswith(f"{_RATE} of") else _RULES.get(name)
        if rule is not None:
            yield from _first_difference(pair, name, rule)
    yield from _differing_length(pair)


def _first_difference(pair: Pair, name: str, rule: Rule) -> Iterator[Difference]:
    ours, theirs = (side.numbers.get(name, {}) for side in pair.sides)
    for step in _common_steps(pair, name, rule):
        values = (ours.get(step), theirs.get(step))
        if not same_number(*values):
            yield _difference(pair, name, rule, step, values)
            return


def _common_steps(pair: Pair, name: str, rule: Rule) -> list[int]:
    """Return the steps of both runs; of a rate those in which both optimizers are called."""
    steps = {*_steps(pair.reference.numbers)} & {*_steps(pair.candidate.numbers)}
    ours, theirs = (side.numbers.get(name, {}) for side in pair.sides)
    if rule is _RATES and ours and theirs:
        # a step that the loss scale skipped calls no optimizer
        steps &= {*ours} & {*theirs}
    return sorted(steps)


def _difference(
    pair: Pair,
    name: str,
    rule: Rule,
    step: int,
    values: tuple[float | None, float | None],
) -> Difference:
    shown = [_shown(name, value) for value in values]
    what = _called(pair, name) if rule is _RATES else rule.name
    text = f"the {what} {_sentence(pair, what, shown)}"
    if not step:
        return pair.difference(
            rule, shown, text=text, why=rule.why, step=step, may_follow=rule.follows
        )
    is_schedule = rule is _RATES
    why = _OTHER_SCHEDULE if is_schedule else rule.why
    later = (*rule.follows, ANY) if _is_driven(pair, name) else rule.follows
    text = f"from step {step} on {text} (equal before it)"
    return pair.difference(rule, shown, text=text, why=why, step=step, may_follow=later)


def _sentence(pair: Pair, what: str, shown: Sequence[str]) -> str:
    ours, theirs = (side.name for side in pair.sides)
    verb = "are" if what.startswith("backward") else "is"
    return f"{verb} {shown[1]} in {theirs}, {shown[0]} in {ours}"


def _is_driven(pair: Pair, name: str) -> bool:
    """Return True for a number that what was trained before decides."""
    classes = {side.value("optimizer", "schedule", "class") for side in pair.sides}
    return not name.startswith(_RATE) or _BY_METRIC in classes


def _called(pair: Pair, name: str) -> str:
    """Return what a learning rate is called: by its group and optimizer where there
    are several."""
    optimizer, _, group = name.removeprefix(f"{_RATE} of ").partition(", group ")
    names = {*pair.reference.numbers, *pair.candidate.numbers}
    words = _RATE
    if f"{_RATE} of {optimizer}, group 1" in names:
        words += f" of parameter group {group or 0}"
    if f"{_RATE} of optimizer 1" in names:
        words += f" of {optimizer}"
    return words


def _shown(name: str, value: float | None) -> str:
    if name == "gradients of the step before":
        return {None: "unknown", 0.0: "done", 1.0: "missing"}.get(value, number(value))
    if name == "clipped after unscaling":
        return {None: "none", 0.0: "missing", 1.0: "done"}.get(value, number(value))
    return number(value)


def _steps(numbers: Mapping[str, Mapping[int, float]]) -> set[int]:
    return {step for series in numbers.values() for step in series}


def _differing_length(pair: Pair) -> Iterator[Difference]:
    if not all(side.run.about.complete for side in pair.sides):
        return
    lengths = [1 + max(_steps(side.numbers), default=-1) for side in pair.sides]
    if lengths[0] != lengths[1]:
        yield pair.difference(_LENGTH, [str(length) for length in lengths])
