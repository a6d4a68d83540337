"""Settings that are texts: optimizers, loaders, modes, seeds, the environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from roundoff.check.findings import NOTE, Difference
from roundoff.check.pair import Pair, same_number, shorten
from roundoff.check.rules import FLOW, OF_GPUS, OTHER_MODEL, SAME_MODEL, Rule, rule_of
from roundoff.check.side import Side
from roundoff.record import Fact

Key = tuple[str, str, str]
#: What is compared in its own way.
_OTHERWISE = ("module", "mode")
#: Groups that say nothing of a side that has none of them.
_WHOLE = ("model", "mode", "data")
#: What a setting of each group is where the program has none.
_ABSENT = {"seed": "not set", "environment": "not set", "compile": "none"}
_NOT_IMPORTED = "not imported"
_PLAIN_SAMPLERS = ("RandomSampler", "SequentialSampler")
_MODULES = Rule(
    group=FLOW,
    name="modules",
    why=OTHER_MODEL,
    fix=SAME_MODEL,
)
_DROPOUT = Rule(
    group=FLOW,
    name="dropout",
    why="another share of the activations is zero in training",
    fix="build both models with the same probabilities",
)


def differing_facts(pair: Pair) -> Iterator[Difference]:
    """Yield the settings that the two sides have otherwise."""
    ours, theirs = pair.sides
    for key in dict.fromkeys((*ours.facts, *theirs.facts)):
        rule = None if key[0] in _OTHERWISE else rule_of(key[0], key[2])
        if key[0] in _WHOLE and not all(_has(side, key[0]) for side in pair.sides):
            continue
        if rule is not None and not _is_told_otherwise(key, pair):
            yield from _differing(pair, key, rule)
    yield from _differing_modules(pair)
    yield from _differing_modes(pair)


def _computes(side: Side, loss: str) -> bool:
    return any((group, of) == ("loss", loss) for group, of, _ in side.facts)


def _has(side: Side, group: str) -> bool:
    return any(name == group for name, _, _ in side.facts)


def _is_told_otherwise(key: Key, pair: Pair) -> bool:
    """Return True for a setting that another one tells of, or that only one of two
    classes has."""
    group, of, name = key
    if (group, name) == ("seed", "initial seed"):
        return all((group, of, "seed") in side.facts for side in pair.sides)
    if group == "loss":
        # a loss that only one of them computes is told by its operators
        return not all(_computes(side, of) for side in pair.sides)
    if group == "data" and name in ("sampler", "shuffle"):
        kinds = {side.value("data", of, "sampler") for side in pair.sides}
        # of these two the name says nothing that "shuffle" does not
        return (name == "sampler") == kinds.issubset(_PLAIN_SAMPLERS)
    return group == "optimizer" and _is_of_one_class(key, pair)


def _is_of_one_class(key: Key, pair: Pair) -> bool:
    """Return True for a setting that one of two classes of optimizers has alone."""
    _, of, name = key
    if name == "class" or all(key in side.facts for side in pair.sides):
        return False
    number = of.partition(",")[0]
    classes = {side.value("optimizer", number, "class") for side in pair.sides}
    return len(classes) > 1


def _differing(pair: Pair, key: Key, rule: Rule) -> Iterator[Difference]:
    group, of, name = key
    facts = [side.facts.get(key) for side in pair.sides]
    values = [_shown(fact, key) for fact in facts]
    if _is_same(values):
        return
    if of == "schedule":
        rule = rule_of(group, of) or rule
    called = rule.name or (name if name.isupper() else name.replace("_", " "))
    lines = [None if fact is None else fact.line for fact in facts]
    yield pair.difference(
        _judged(rule, pair, key, values),
        values,
        name=called,
        subject=_subject(group, of, called),
        reference_line=lines[0],
        line=lines[1],
    )


def _judged(rule: Rule, pair: Pair, key: Key, values: Sequence[str]) -> Rule:
    """Return the rule of a setting: a note where it changes nothing."""
    if key[2] in OF_GPUS and not any(map(_has_gpu, pair.sides)):
        why = f"{rule.why}; no GPU was there, so it changed nothing here"
        return replace(rule, severity=NOTE, why=why)
    if _NOT_IMPORTED in values or _is_without_effect(pair, key):
        return replace(rule, severity=NOTE)
    return rule


def _is_without_effect(pair: Pair, key: Key) -> bool:
    """Return True for an attribute of a data set that gives the same batches."""
    group, of, name = key
    if group != "data" or not name.startswith("data set's "):
        return False
    hashes = [
        [
            content.hash
            for batch in side.batches.get(of, ())
            for content in batch.tensors
        ]
        for side in pair.sides
    ]
    return bool(hashes[0]) and hashes[0] == hashes[1]


def _shown(fact: Fact | None, key: Key) -> str:
    if fact is not None:
        return fact.value
    group, _, name = key
    is_package = group == "environment" and not name.isupper()
    return _NOT_IMPORTED if is_package else _ABSENT.get(group, "none")


def _is_same(values: Sequence[str]) -> bool:
    if values[0] == values[1]:
        return True
    with suppress(ValueError):
        return same_number(float(values[0]), float(values[1]))
    return False


def _subject(group: str, of: str, called: str) -> str:
    if of == "schedule":
        return f"the {called}"
    if group in ("optimizer", "data") and of not in ("", "optimizer 0", "loader 0"):
        return f"the {called} of {of}"
    if group == "loss":
        return f"the {called} of the loss {of}"
    if group == "seed":
        return f"{of}'s {called}"
    if group == "scaler":
        return f"the loss scale's {called}"
    if group == "autocast":
        return f"the autocast that was asked for on {of}"
    return f"the {called}" if not called.isupper() else called


def _has_gpu(side: Side) -> bool:
    return side.value("environment", "", "GPU") is not None


def _differing_modules(pair: Pair) -> Iterator[Difference]:
    """Modules that hold no others, and have other settings or are in one model alone."""
    ours, theirs = (_modules(side) for side in pair.sides)
    if not ours or not theirs:
        return
    changed = [path for path in ours if ours[path] != theirs.get(path, ours[path])]
    dropouts = [path for path in changed if "Dropout(" in ours[path]]
    others = [path for path in changed if path not in dropouts]
    yield from _changed(pair, dropouts, _DROPOUT, ours, theirs)
    yield from _changed(pair, others, _MODULES, ours, theirs)
    yield from _lacking(pair, ours, theirs)


def _lacking(
    pair: Pair, ours: dict[str, str], theirs: dict[str, str]
) -> Iterator[Difference]:
    """Yield that each model has modules that the other lacks."""
    values = [_without(ours, theirs), _without(theirs, ours)]
    if values != ["none", "none"]:
        subject = "the modules that the other model lacks"
        yield pair.difference(_MODULES, values, subject=subject)


def _without(modules: dict[str, str], others: dict[str, str]) -> str:
    """Return the paths of modules that the others lack."""
    paths = [path for path in modules if path not in others]
    return shorten(", ".join(paths) or "none")


def _changed(
    pair: Pair,
    paths: Sequence[str],
    rule: Rule,
    ours: dict[str, str],
    theirs: dict[str, str],
) -> Iterator[Difference]:
    """Yield one difference for all modules that have other settings."""
    if not paths:
        return
    first = paths[0]
    kind = "dropout" if rule is _DROPOUT else "module"
    more = f" (and {len(paths) - 1} more modules)" if len(paths) > 1 else ""
    subject = f"the {kind} {first or 'that is the model'}{more}"
    yield pair.difference(rule, (ours[first], theirs[first]), subject=subject)


def _modules(side: Side) -> dict[str, str]:
    return {
        of: fact.value
        for (group, of, _), fact in side.facts.items()
        if group == "module"
    }


def _differing_modes(pair: Pair) -> Iterator[Difference]:
    """Modes, and when they changed."""
    rule = rule_of("mode", "mode")
    values = [_modes(side) for side in pair.sides]
    if "unknown" in values:
        return
    if rule is not None and values[0] != values[1]:
        yield pair.difference(rule, values, subject="the mode of the model")


def _modes(side: Side) -> str:
    modes = [
        f"{fact.value} {of}".strip()
        for (group, of, _), fact in side.facts.items()
        if group == "mode"
    ]
    return ", then ".join(modes) or "unknown"
