"""The first batches: the same samples, in the same order, with the same values?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from roundoff.check.findings import ROUNDING, Difference
from roundoff.check.outside_tensors import PROGRAM
from roundoff.check.pair import Pair, shorten
from roundoff.check.rules import ANY, DATA, ENVIRONMENT, FLOW, WEIGHTS, Rule
from roundoff.check.weights import described, differs, is_close
from roundoff.record import Batch, TensorContent

_LOADERS = (
    "processes",
    "seed of the order",
    "shuffle",
    "sampler",
    "batch sampler",
    "seed",
    "initial seed",
    "samples",
    "sampler's rank",
    "sampler's seed",
    "sampler's weights",
    "samples of the subset",
    "number of processes",
)
_ORDER = Rule(
    group=DATA,
    name="order of the data",
    why="the same samples in another order make other gradients at every step",
    fix="give samplers and generators the same seed, and shuffle in both or none",
    follows=_LOADERS,
)
_SAMPLES = replace(
    _ORDER,
    name="first samples",
    why="the first batches hold other samples: another order, shard or data set",
    fix="compare sampler, shard of each rank, seed and data set",
)
_VALUES = Rule(
    group=DATA,
    name="values of the data",
    why="the same samples have other values: another preprocessing, decoder or file",
    fix="compare transforms, decoders and their versions, and the files",
    follows=(
        "transform",
        "data set",
        "samples",
        "order of the data",
        ENVIRONMENT,
        *_LOADERS,
    ),
)
_LAST_BITS = replace(
    _VALUES,
    severity=ROUNDING,
    why="the last bits differ: another decoder, version or order of computing",
)
_SHAPES = Rule(
    group=DATA,
    name="shape of the data",
    why="the model receives something else",
    fix="compare transforms, cropping and padding, and how batches are put together",
    follows=(
        "batch size",
        "transform",
        "data set",
        "processes",
        "default dtype",
        "shapes of parameters",
        "modules",
    ),
)
_RECEIVED = Rule(
    group=DATA,
    name="batch size",
    why="gradients are means over another number of samples, and a learning rate "
    "belongs to a batch size",
    fix="give both programs batches of the same size",
)
#: Sources that receive what was loaded or computed before.
_RECEIVING = ("model", "loss")
#: What a source gives, where it is more than data.
_KINDS = {"loss": "the labels"}
#: What may move what a model computed, and another one receives, before an update.
_BEFORE = (FLOW, WEIGHTS)
#: Indexes that a sentence shows.
_MOST = 6


def differing_data(pair: Pair) -> Iterator[Difference]:
    """Yield what differs in the first batches; one difference a source."""
    ours, theirs = (side.batches for side in pair.sides)
    is_told = False
    for source in sorted({*ours} & {*theirs}, key=_received_last):
        if source in _RECEIVING and is_told:
            continue  # it receives what the loaders give
        for difference in _differing_source(pair, source):
            is_told = is_told or source not in _RECEIVING
            yield difference


def _differing_source(pair: Pair, source: str) -> Iterator[Difference]:
    ours, theirs = (side.batches[source] for side in pair.sides)
    if source in (*_RECEIVING, PROGRAM):
        yield from _other_sizes(pair, source, ours, theirs)
    difference = (
        _other_indexes(pair, source, ours, theirs)
        or _other_shapes(pair, source, ours, theirs)
        or _other_values(pair, source, ours, theirs)
    )
    if difference is not None:
        yield difference


def _other_sizes(
    pair: Pair, source: str, ours: Sequence[Batch], theirs: Sequence[Batch]
) -> Iterator[Difference]:
    """Yield that batches of other sizes are received, where no loader tells of it."""
    sizes = [str(_size(batches[0])) for batches in (ours, theirs)]
    if sizes[0] != sizes[1] and not _is_fed_by_another(pair, source):
        yield pair.difference(_RECEIVED, sizes)


def _is_fed_by_another(pair: Pair, source: str) -> bool:
    """Return True where what a source receives is compared at another one, before it."""
    others = ({*pair.reference.batches} & {*pair.candidate.batches}) - {source}
    feeding = others.difference(_RECEIVING)
    return bool(feeding) or (source == "loss" and "model" in others)


def _received_last(source: str) -> tuple[bool, str]:
    return source in _RECEIVING, source


def _size(batch: Batch) -> int | None:
    shapes = [content.shape for content in batch.tensors if content.shape]
    return shapes[0][0] if shapes else None


def _other_indexes(
    pair: Pair, source: str, ours: Sequence[Batch], theirs: Sequence[Batch]
) -> Difference | None:
    """The sampler gave other samples, or the same in another order."""
    indexes = [
        [index for batch in batches for index in batch.indexes]
        for batches in (ours, theirs)
    ]
    length = min(map(len, indexes))
    if not length or indexes[0][:length] == indexes[1][:length]:
        return None
    values = [_listed(each[:_MOST]) for each in indexes]
    same = Counter(indexes[0][:length]) == Counter(indexes[1][:length])
    rule = _ORDER if same or _is_all(pair, source, indexes) else _SAMPLES
    subject = f"the samples that {source} gives first"
    return pair.difference(rule, values, subject=subject)


def _is_all(pair: Pair, source: str, indexes: Sequence[Sequence[int]]) -> bool:
    """Return True where both loaders go through a whole data set of one size."""
    facts = [
        [
            side.value("data", source, name)
            for name in ("samples", "sampler's num_samples")
        ]
        for side in pair.sides
    ]
    samples = {each[0] for each in facts}
    drawn = {each[1] or each[0] for each in facts}
    return (
        len(samples) == 1 and drawn == samples and None not in samples and bool(indexes)
    )


def _other_shapes(
    pair: Pair, source: str, ours: Sequence[Batch], theirs: Sequence[Batch]
) -> Difference | None:
    values = [_shapes(batches[0]) for batches in (ours, theirs)]
    if values[0] == values[1]:
        return None
    subject = f"the shape of what {_gives(source)}"
    return pair.difference(_SHAPES, values, subject=subject)


def _shapes(batch: Batch) -> str:
    """Return the shapes of a batch's entries: without the first dimension."""
    words = [f"{c.dtype} {list(c.shape[1:])}" for c in batch.tensors]
    return shorten(", ".join(words))


def _other_values(
    pair: Pair, source: str, ours: Sequence[Batch], theirs: Sequence[Batch]
) -> Difference | None:
    entries = [_all_entries(batches) for batches in (ours, theirs)]
    length = min(map(len, entries))
    common = [each[:length] for each in entries]
    if length and common[0] == common[1]:
        return None
    if length > 1 and Counter(common[0]) == Counter(common[1]):
        text = (
            f"{_gives(source)} the same {length} samples in {pair.candidate.name} in "
            f"another order than in {pair.reference.name}"
        )
        return pair.difference(_ORDER, ("one order", "another"), text=text)
    return _first_values(pair, source, ours, theirs)


def _all_entries(batches: Sequence[Batch]) -> list[str]:
    return [entry for batch in batches for entry in _entries(batch)]


def _entries(batch: Batch) -> Sequence[str]:
    return next((c.entries for c in batch.tensors if c.entries), ())


def _first_values(
    pair: Pair, source: str, ours: Sequence[Batch], theirs: Sequence[Batch]
) -> Difference | None:
    """The first tensor whose values differ."""
    for mine, other in zip(ours, theirs, strict=False):
        for content, twin in zip(mine.tensors, other.tensors, strict=False):
            if content.shape == twin.shape and differs(content, twin):
                return _values(pair, source, mine, content, twin)
    return None


def _values(
    pair: Pair, source: str, batch: Batch, content: TensorContent, twin: TensorContent
) -> Difference:
    values = [described(content), described(twin)]
    what = f"{_noun(source)} {content.name} that {_gives(source)}"
    text = (
        f"{_KINDS.get(source, 'the data')} differ: {what} in batch {batch.number} has "
        f"{values[1]} in {pair.candidate.name}, {values[0]} in "
        f"{pair.reference.name}{_scaled(content, twin)}"
    )
    follows = _VALUES.follows
    if source in _RECEIVING:
        follows = (*follows, ANY if batch.step else "", *_BEFORE)
    rule = _LAST_BITS if is_close(content, twin) else _VALUES
    rule = replace(rule, follows=follows)
    return pair.difference(rule, values, text=text, step=batch.step)


def _scaled(content: TensorContent, twin: TensorContent) -> str:
    """Return the words for a factor and an offset that lead from one to the other."""
    if not content.std or not twin.std:
        return ""
    factor = twin.std / content.std
    offset = (twin.mean or 0.0) - factor * (content.mean or 0.0)
    for mine, other in ((content.min, twin.min), (content.max, twin.max)):
        if abs(factor * (mine or 0.0) + offset - (other or 0.0)) > 1e-4 * twin.std:
            return ""
    return f": the first is the second times {factor:.4g} plus {offset:.4g}"


def _noun(source: str) -> str:
    return "argument" if source == "loss" else "input"


def _gives(source: str) -> str:
    words = {"model": "the model receives", "loss": "the loss function receives"}
    return words.get(source, f"{source} gives")


def _listed(indexes: Sequence[int]) -> str:
    return f"{', '.join(map(str, indexes))} …"
