"""Two runs: everything that differs in how they were set up, the likeliest cause first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from roundoff.check.data import differing_data
from roundoff.check.facts import differing_facts
from roundoff.check.findings import (
    CHANGES,
    NOTE,
    SEVERITIES,
    Agreement,
    Check,
    Difference,
    NotRecorded,
)
from roundoff.check.losses import losses_of_ranks
from roundoff.check.low_precision import differing_precision, dtypes_of, in_words
from roundoff.check.operators import differing_operators
from roundoff.check.pair import Pair, number
from roundoff.check.rules import (
    ANY,
    DATA,
    ENVIRONMENT,
    FLOW,
    GROUPS,
    HYPER_PARAMETERS,
    PRECISION,
    PROCESSES,
    SCALING,
    SEEDS,
    WEIGHTS,
    Rule,
)
from roundoff.check.side import Side, short_names
from roundoff.check.skipped_steps import differing_skips, skipped_steps
from roundoff.check.step_numbers import differing_numbers
from roundoff.check.weights import differing_weights
from roundoff.errors import RunError
from roundoff.record import Run, TensorContent

_PROCESSES = Rule(
    group=PROCESSES,
    name="processes",
    why="each step trains on another number of samples, and each rank on other ones",
    fix="start both with as many processes, or scale batch size and accumulation",
)


def check_runs(
    reference: Run,
    candidate: Run,
    *,
    repeats: Sequence[Run] = (),
    names: tuple[str, str] | None = None,
) -> Check:
    """Compare how two runs were set up.

    Args:
        reference: the run to trust.
        candidate: the other one.
        repeats: of the reference, for the losses.
        names: what the runs are called in sentences.

    Raises ``RunError`` where the runs have no rank in common, and for damaged files.
    """
    places = (reference.location, candidate.location)
    called = names or short_names(*places)
    ranks = [rank for rank in reference.ranks if rank in candidate.ranks]
    if not ranks:
        raise RunError(
            "the two runs have no rank in common",
            where=f"{places[0]} and {places[1]}",
            got=f"ranks {reference.ranks} and {candidate.ranks}",
        )
    pairs = [_pair(reference, candidate, called, rank) for rank in ranks]
    merged = _merged([each for pair in pairs for each in _differences(pair)])
    ordered = _in_order([*_differing_processes(pairs[0]), *merged])
    missing = tuple(_missing(pairs[0]))
    return Check(
        reference=places[0],
        candidate=places[1],
        differences=tuple(ordered),
        agreements=tuple(_agreements(pairs[0], ordered, missing)),
        missing=missing,
        losses=losses_of_ranks(pairs, repeats),
        remarks=tuple(_remarks(pairs[0])),
    )


def _pair(reference: Run, candidate: Run, called: tuple[str, str], rank: int) -> Pair:
    ours = Side(reference, called[0], rank)
    return Pair(ours, Side(candidate, called[1], rank).grouped_as(ours))


def _differing_processes(pair: Pair) -> Iterator[Difference]:
    counts = [str(side.run.about.ranks or 1) for side in pair.sides]
    if counts[0] != counts[1]:
        yield pair.difference(_PROCESSES, counts, subject="the number of processes")


def _differences(pair: Pair) -> Iterator[Difference]:
    if all(side.set_up is not None for side in pair.sides):
        yield from differing_facts(pair)
        yield from differing_numbers(pair)
        yield from differing_skips(pair)
        yield from differing_data(pair)
        yield from differing_weights(pair)
    yield from differing_precision(pair)
    yield from differing_operators(pair)


def _merged(differences: Sequence[Difference]) -> list[Difference]:
    """Join what several ranks have alike."""
    merged: dict[tuple[str, str, str], Difference] = {}
    for each in differences:
        key = (each.group, each.name, each.text)
        present = merged.get(key)
        if present is None:
            merged[key] = each
        else:
            merged[key] = replace(present, ranks=(*present.ranks, *each.ranks))
    return list(merged.values())


def _in_order(differences: Sequence[Difference]) -> list[Difference]:
    """Sort: causes before what follows from them, then by severity, then by group."""
    explained = [_explained(each, differences) for each in differences]
    return sorted(explained, key=_key)


def _key(difference: Difference) -> tuple[bool, int, bool, int, int]:
    return (
        difference.follows is not None,
        SEVERITIES.index(difference.severity),
        bool(difference.step),
        GROUPS.index(difference.group),
        difference.step or 0,
    )


def _explained(each: Difference, others: Sequence[Difference]) -> Difference:
    """Return the difference with the name of the one that it follows from."""
    for other in others:
        if other.severity != NOTE and _may_explain(other, each):
            return replace(each, follows=other.name)
    return each


def _may_explain(other: Difference, each: Difference) -> bool:
    """Return True where one difference may be the cause of another, and is no effect of
    it: named, or by its group, or any that changes the training."""
    if other.name == each.name:
        return False
    if _is_named_cause(other, each):
        return other.severity == CHANGES or each.severity != CHANGES
    is_cause = other.severity == CHANGES and ANY not in other.may_follow
    is_before = (other.step or 0) <= (each.step or 0)
    return ANY in each.may_follow and is_cause and is_before


def _is_named_cause(other: Difference, each: Difference) -> bool:
    """Return True where a difference names another, or its group, as what it may follow."""
    is_of_group = other.group in each.may_follow and other.group != each.group
    return other.name in each.may_follow or is_of_group


def _missing(pair: Pair) -> Iterator[NotRecorded]:
    """Yield the groups that one of the two did not record, and why."""
    without = [side for side in pair.sides if side.set_up is None]
    for side in without:
        yield NotRecorded(
            group="set-up",
            text=f"seeds, data, weights, hyper-parameters and environment: "
            f"{side.why_not_recorded}",
        )
    if not without:
        yield from _stopped(pair)
        yield from _missing_parts(pair)


def _stopped(pair: Pair) -> Iterator[NotRecorded]:
    """Yield the set-ups that were not noted to their end, and why."""
    for side in pair.sides:
        set_up = side.set_up
        if set_up is not None and set_up.stopped is not None:
            text = (
                f"the set-up of {side.name} was not noted to its end: {set_up.stopped}"
            )
            yield NotRecorded(group="set-up", text=text)


def _missing_parts(pair: Pair) -> Iterator[NotRecorded]:
    """Yield the parts of set-ups that are not there, and why they may not be."""
    for group, is_there, why in _PARTS:
        lacking = [side.name for side in pair.sides if not is_there(side)]
        if lacking:
            yield NotRecorded(
                group=group, text=f"not in {' and '.join(lacking)}: {why}"
            )


def _has_losses(side: Side) -> bool:
    return "loss" in side.numbers


#: Group, whether a side has it, and why it may not.
_PARTS: tuple[tuple[str, Callable[[Side], bool], str], ...] = (
    (
        DATA,
        lambda side: bool(side.batches),
        "no DataLoader gave batches, and no model received tensors",
    ),
    (WEIGHTS, lambda side: bool(_parameters(side)), "no model was called"),
    ("losses", _has_losses, "backward() was not called on a single number"),
)


def _parameters(side: Side) -> Sequence[TensorContent]:
    return () if side.set_up is None else side.set_up.parameters


def _agreements(
    pair: Pair, differences: Sequence[Difference], missing: Sequence[NotRecorded]
) -> Iterator[Agreement]:
    """Yield a line for each group in which nothing differs."""
    absent = {each.group for each in missing}
    if pair.reference.set_up is None or pair.candidate.set_up is None:
        absent.update(GROUPS)
        absent.discard(PROCESSES)
        absent.discard(PRECISION)
    differing = {each.group for each in differences}
    for group in GROUPS:
        text = "" if group in absent | differing else _WORDS[group](pair.reference)
        if text:
            yield Agreement(group=group, text=text)


def _processes_in_words(side: Side) -> str:
    count = side.run.about.ranks or 1
    return "1 process each" if count == 1 else f"{count} processes each"


def _seeds_in_words(side: Side) -> str:
    return f"torch's seed is {side.value('seed', 'torch', 'initial seed')}"


def _rates_in_words(side: Side) -> str:
    rates = side.numbers.get("learning rate of optimizer 0", {})
    kind = side.value("optimizer", "optimizer 0", "class")
    if kind is None:
        return "no optimizer stepped"
    parts = [kind]
    if rates:
        parts.append(f"learning rate {number(rates[min(rates)])}")
    passes = side.numbers.get("backward passes", {})
    if passes:
        count = passes[min(passes)]
        parts.append(
            f"{count:.0f} backward {'pass' if count == 1 else 'passes'} a step"
        )
    limit = side.numbers.get("max_norm of clipping", {})
    parts.append(f"clipped to {number(limit[min(limit)])}" if limit else "no clipping")
    return ", ".join(parts)


def _flow_in_words(side: Side) -> str:
    modules = sum(group == "module" for group, _, _ in side.facts)
    mode = side.value("mode", "", "mode") or "unknown"
    frozen = side.value("model", "", "frozen parameters")
    return f"{modules} modules with the same settings, mode {mode}, frozen: {frozen}"


def _data_in_words(side: Side) -> str:
    batches = sum(len(batches) for batches in side.batches.values())
    loader = side.value("data", "loader 0", "batch size")
    size = "" if loader is None else f", batch size {loader}"
    return f"the first {batches} batches hold the same values in the same order{size}"


def _weights_in_words(side: Side) -> str:
    return f"{len(_parameters(side))} parameters, bit for bit"


def _precision_in_words(side: Side) -> str:
    dtypes = dtypes_of(side)
    low = in_words(dtypes, list(dtypes))
    return f"operators that ran in low precision: {low}"


def _scaling_in_words(side: Side) -> str:
    scales = side.numbers.get("loss scale", {})
    if not scales:
        return "no loss scale in either"
    skipped = len(skipped_steps(side))
    ends = f"{number(scales[min(scales)])} at first, {number(scales[max(scales)])} last"
    return f"{ends}, {skipped or 'no'} steps skipped"


def _environment_in_words(side: Side) -> str:
    facts = [name for group, _, name in side.facts if group == "environment"]
    torch = side.value("environment", "", "torch")
    return f"{len(facts)} versions and flags, torch {torch}"


_WORDS: Mapping[str, Callable[[Side], str]] = {
    PROCESSES: _processes_in_words,
    SEEDS: _seeds_in_words,
    DATA: _data_in_words,
    HYPER_PARAMETERS: _rates_in_words,
    FLOW: _flow_in_words,
    WEIGHTS: _weights_in_words,
    PRECISION: _precision_in_words,
    SCALING: _scaling_in_words,
    ENVIRONMENT: _environment_in_words,
}


def _remarks(pair: Pair) -> Iterator[str]:
    """Yield what is worth knowing of the scripts and of how they were recorded."""
    yield from _other_text(pair)
    yield from _other_arguments(pair)
    for side in pair.sides:
        if side.run.about.complete is not True:
            yield f"the program of {side.name} did not come to its end"


def _other_text(pair: Pair) -> Iterator[str]:
    ours, theirs = (side.run.about.sources for side in pair.sides)
    if not ours or not theirs:
        return
    names = sorted({*ours} | {*theirs})
    edited = [name for name in names if ours.get(name) != theirs.get(name)]
    if edited:
        yield f"other text in {', '.join(edited[:5])}"


def _other_arguments(pair: Pair) -> Iterator[str]:
    commands = [side.run.about.command for side in pair.sides]
    words = [" ".join((command or [])[1:]) or "none" for command in commands]
    if all(commands) and words[0] != words[1]:
        ours, theirs = (side.name for side in pair.sides)
        yield f"other arguments: {words[0]} in {ours}, {words[1]} in {theirs}"
