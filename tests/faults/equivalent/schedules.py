"""The same computation in other portions: right, and with one thing wrong.

The reference takes the whole batch of whole sequences at once. A bug is a schedule with ``sites``: globs over
``module/operator``, of which one must be named first.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundoff

from .models import LENGTH, Gpt, causal, gpt_batch, gpt_loss

Folder = str | os.PathLike[str]
Caches = list[list[Tensor]]
Run = Callable[[nn.Module, Tensor], object]


@dataclass(frozen=True)
class Schedule:
    """``candidate`` does in portions what ``reference`` does at once.

    ``sites`` is empty for a right one.
    """

    name: str
    reference: Run
    candidate: Run
    network: Callable[[], nn.Module]
    sites: tuple[str, ...] = ()

    @property
    def apart(self) -> bool:
        """True for the quarter that is measured at the end alone."""
        return zlib.crc32(self.name.encode()) % 4 == 0

    def record(self, folder: Folder, *, candidate: bool) -> None:
        """Run one side and record it."""
        torch.manual_seed(0)
        model = self.network()
        (ids,) = gpt_batch(1)
        with roundoff.capture(folder, model, keep="tensors") as run:
            (self.candidate if candidate else self.reference)(model, ids)
            run.step()


SCHEDULES: list[Schedule] = []


def schedule(
    reference: Run, sites: str = "", network: Callable[[], nn.Module] = Gpt
) -> Callable[[Run], Run]:
    """Enters the decorated function as a schedule; with ``sites`` it has a bug there."""

    def enter(candidate: Run) -> Run:
        name = candidate.__name__
        SCHEDULES.append(
            Schedule(name, reference, candidate, network, tuple(sites.split()))
        )
        return candidate

    return enter


def whole(model: nn.Module, ids: Tensor) -> object:
    """The reference of inference."""
    with torch.no_grad():
        return model.eval()(ids)


def _empty(model: Gpt) -> Caches:
    return [[] for _ in model.blocks]


def _chunks(model: Gpt, ids: Tensor, sizes: list[int]) -> Tensor:
    caches = _empty(model)
    outputs = []
    start = 0
    for size in sizes:
        end = start + size
        places = torch.arange(start, end)
        mask = causal(size, end)
        outputs.append(model(ids[:, start:end], places, mask, caches))
        start = end
    return torch.cat(outputs, 1)


# -- right: inference -------------------------------------------------------------


@schedule(whole)
@torch.no_grad()
def token_by_token(model, ids):
    _chunks(model, ids, [1] * LENGTH)


@schedule(whole)
@torch.no_grad()
def chunked_prefill(model, ids):
    _chunks(model, ids, [5, 5, 2])


@schedule(whole)
@torch.no_grad()
def prefill_then_decode(model, ids):
    _chunks(model, ids, [LENGTH - 3, 1, 1, 1])


def _padded(ids: Tensor, length: int, left: bool) -> Tensor:
    spare = length - ids.shape[1]
    return F.pad(ids, (spare, 0) if left else (0, spare))


@schedule(whole)
@torch.no_grad()
def padded_on_the_right(model, ids):
    model(_padded(ids, LENGTH + 4, left=False))


@schedule(whole)
@torch.no_grad()
def padded_on_the_left(model, ids):
    spare = 4
    places = (torch.arange(LENGTH + spare) - spare).clamp(min=0)
    mask = causal(LENGTH + spare, LENGTH + spare)
    mask[:, :spare] = False
    mask[torch.arange(spare), torch.arange(spare)] = True
    model(_padded(ids, LENGTH + spare, left=True), places, mask)


@schedule(whole)
@torch.no_grad()
def one_sample_at_a_time(model, ids):
    for sample in ids:
        model(sample[None])


@schedule(whole)
@torch.no_grad()
def micro_batches(model, ids):
    torch.cat([model(part) for part in ids.split(2)])


@schedule(whole)
@torch.no_grad()
def uneven_micro_batches(model, ids):
    torch.cat([model(part) for part in ids.split(3)])


@schedule(whole)
@torch.no_grad()
def other_order_of_samples(model, ids):
    order = torch.tensor([2, 0, 3, 1])
    model(ids[order])[order.argsort()]


@schedule(whole)
@torch.no_grad()
def two_sequences_in_one_row(model, ids):
    for pair in ids.split(2):
        packed = pair.flatten()[None]
        places = torch.arange(LENGTH).repeat(2)
        mask = torch.block_diag(causal(LENGTH, LENGTH), causal(LENGTH, LENGTH)).bool()
        model(packed, places, mask)


@schedule(whole)
@torch.no_grad()
def samples_and_chunks(model, ids):
    for sample in ids:
        _chunks(model, sample[None], [7, 5])


@schedule(whole)
@torch.no_grad()
def a_longer_batch(model, ids):
    model(torch.cat([ids, gpt_batch(9)[0]]))


# -- right: training -----------------------------------------------------------------


def trained(model, ids):
    """The reference of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gpt_loss(model, ids).backward()
    optimizer.step()


def _accumulated(model, parts, scale):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in parts:
        (gpt_loss(model, part) * scale(part)).backward()
    optimizer.step()


@schedule(trained)
def accumulated_halves(model, ids):
    _accumulated(model, ids.split(2), lambda part: 0.5)


@schedule(trained)
def accumulated_samples(model, ids):
    _accumulated(model, ids.split(1), lambda part: 0.25)


@schedule(trained)
def accumulated_by_size(model, ids):
    _accumulated(model, ids.split(3), lambda part: len(part) / len(ids))


class Reader(nn.Module):
    """Reads a sequence with a GRU and writes logits of the next token."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, 40)

    def forward(self, ids, state=None):
        if state is None:
            state = torch.zeros(len(ids), 16)
        states = []
        for x in self.tokens(ids).unbind(1):
            state = self.cell(x, state)
            states.append(state)
        return self.head(torch.stack(states, 1)), state


@schedule(whole, network=Reader)
@torch.no_grad()
def recurrent_in_chunks(model, ids):
    state = None
    for part in ids.split(5, 1):
        _, state = model(part, state)


@schedule(whole, network=Reader)
@torch.no_grad()
def recurrent_one_sample(model, ids):
    for sample in ids:
        model(sample[None])


# -- wrong ---------------------------------------------------------------------------


@schedule(whole, "places/* /add*")
@torch.no_grad()
def position_one_too_far(model, ids):
    caches = _empty(model)
    model(ids[:, :8], torch.arange(8), causal(8, 8), caches)
    for n in range(8, LENGTH):
        model(ids[:, n : n + 1], torch.tensor([n + 1]), causal(1, n + 1), caches)


@schedule(whole, "places/* /add*")
@torch.no_grad()
def positions_start_again(model, ids):
    caches = _empty(model)
    for start, part in ((0, ids[:, :6]), (6, ids[:, 6:])):
        model(part, torch.arange(6), causal(6, start + 6), caches)


@schedule(whole, "blocks.0.attention/*")
@torch.no_grad()
def cache_overwritten(model, ids):
    caches = _empty(model)
    model(ids[:, :6], torch.arange(6), causal(6, 6), caches)
    caches = _empty(model)
    model(ids[:, 6:], torch.arange(6, LENGTH), causal(6, 6), caches)


@schedule(whole, "blocks.0.attention/*")
@torch.no_grad()
def last_key_not_seen(model, ids):
    caches = _empty(model)
    model(ids[:, :8], torch.arange(8), causal(8, 8), caches)
    for n in range(8, LENGTH):
        mask = torch.ones(1, n + 1, dtype=torch.bool)
        mask[:, 0] = False
        model(ids[:, n : n + 1], torch.tensor([n]), mask, caches)


@schedule(whole, "blocks.0.attention/*")
@torch.no_grad()
def future_seen_in_chunk(model, ids):
    caches = _empty(model)
    model(ids[:, :6], torch.arange(6), causal(6, 6), caches)
    mask = torch.ones(6, LENGTH, dtype=torch.bool)
    model(ids[:, 6:], torch.arange(6, LENGTH), mask, caches)


@schedule(whole, "blocks.1.attention/*")
@torch.no_grad()
def cache_of_another_layer(model, ids):
    caches = _empty(model)
    model(ids[:, :8], torch.arange(8), causal(8, 8), caches)
    caches[1] = list(caches[0])
    model(ids[:, 8:], torch.arange(8, LENGTH), causal(4, LENGTH), caches)


@schedule(whole, "blocks.0.attention/*")
@torch.no_grad()
def values_are_keys(model, ids):
    caches = _empty(model)
    model(ids[:, :8], torch.arange(8), causal(8, 8), caches)
    caches[0][1] = caches[0][0]
    model(ids[:, 8:], torch.arange(8, LENGTH), causal(4, LENGTH), caches)


@schedule(whole, "blocks.0.attention/*")
@torch.no_grad()
def padding_on_the_left_seen(model, ids):
    places = (torch.arange(LENGTH + 4) - 4).clamp(min=0)
    model(_padded(ids, LENGTH + 4, left=True), places)


@schedule(whole, "places/* /add*")
@torch.no_grad()
def padding_counted_in_positions(model, ids):
    mask = causal(LENGTH + 4, LENGTH + 4)
    mask[:, :4] = False
    mask[torch.arange(4), torch.arange(4)] = True
    model(_padded(ids, LENGTH + 4, left=True), None, mask)


@schedule(whole, "blocks.0.attention/*")
@torch.no_grad()
def sequences_see_each_other(model, ids):
    for pair in ids.split(2):
        model(pair.flatten()[None], torch.arange(LENGTH).repeat(2))


@schedule(whole, "tokens/* */tokens* tokens*")
@torch.no_grad()
def last_token_repeated(model, ids):
    caches = _empty(model)
    model(ids[:, :8], torch.arange(8), causal(8, 8), caches)
    for n in range(8, LENGTH):
        model(ids[:, n - 1 : n], torch.tensor([n]), causal(1, n + 1), caches)


@schedule(whole, "cell/*", Reader)
@torch.no_grad()
def state_not_carried(model, ids):
    for part in ids.split(6, 1):
        model(part)


@schedule(whole, "cell/*", Reader)
@torch.no_grad()
def state_of_another_sample(model, ids):
    _, state = model(ids[:, :6])
    model(ids[:, 6:], state.flip(0))


@schedule(trained, "/mul* /nll* /cross* /div* /ones_like* *.grad")
def accumulation_not_divided(model, ids):
    _accumulated(model, ids.split(2), lambda part: 1.0)


@schedule(trained, "/mul* /nll* *.grad")
def uneven_parts_weighted_alike(model, ids):
    _accumulated(model, ids.split(3), lambda part: 0.5)


@schedule(trained, "*.grad */accumulate* /zero* */add* */sub*")
def gradients_cleared_between_parts(model, ids):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in ids.split(2):
        optimizer.zero_grad()
        (gpt_loss(model, part) * 0.5).backward()
    optimizer.step()


@schedule(trained, "/add* /sub* */add* *add_*")
def a_step_after_each_part(model, ids):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in ids.split(2):
        optimizer.zero_grad()
        (gpt_loss(model, part) * 0.5).backward()
        optimizer.step()
