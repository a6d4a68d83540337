"""The four guidelines of ShuffleNetV2, each with its effect on this machine: the layer in
question against a changed one of the same work.

Ma, Zhang, Zheng, Sun 2018, "ShuffleNet V2: practical guidelines for efficient CNN
architecture design", section 2. A change of this kind makes another network, which has to
be trained: it is for the user, and has no precision cost to measure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.advise.advice import PAYS, TRIAL_ERRORS, AdviceRow, first_line
from roundoff.advise.facts import Facts
from roundoff.advise.layer_calls import CONVOLUTIONS, LayerCall
from roundoff.advise.operator_count import OperatorCount
from roundoff.advise.trial import measure_speed

SOURCE = "Ma et al. 2018, ShuffleNet V2, guideline"
#: Channels in and out that lie further apart are unequal.
UNEQUAL = 2.0
#: So many layers of one input are fragments.
FRAGMENTS = 3
#: From this share of the time on, element-wise work is worth a word.
ELEMENTWISE_SHARE = 0.1
#: What is done to a network that only its author can change.
ANOTHER_NETWORK = (
    "another network, to be trained: its precision is no matter of rounding"
)


@dataclass(frozen=True)
class _Case:
    """A layer of the model beside a changed one, as calls of both."""

    name: str
    seen: str
    place: str
    do: str
    why: str
    number: str
    unchanged: Callable[[], object]
    changed: Callable[[], object]
    share: float | None = None
    reason: str = ANOTHER_NETWORK


def try_guidelines(facts: Facts, *, seconds: float) -> list[AdviceRow]:
    """Return a row for each guideline that a layer breaks, the costliest layer of each."""
    rows: list[AdviceRow] = []
    with torch.no_grad():
        for find in (_equal_channels, _groups, _fragments, _elementwise):
            case = find(facts, facts.layers)
            if case is not None:
                rows.append(_try(case, facts, seconds))
    return rows


def _try(case: _Case, facts: Facts, seconds: float) -> AdviceRow:
    speed = None
    verdict = "not tried"
    reason = case.reason
    try:
        speed = measure_speed(
            case.unchanged, case.changed, seconds=seconds, device=facts.device
        )
    except TRIAL_ERRORS as error:
        reason = f"it failed: {first_line(error)}"
    if speed is not None:
        pays = speed.median >= PAYS and speed.low > 1
        verdict = "by hand" if pays else "does not pay"
    return AdviceRow(
        name=case.name,
        seen=case.seen,
        place=case.place,
        do=case.do,
        why=case.why,
        source=f"{SOURCE} {case.number}",
        verdict=verdict,
        reason=reason,
        speed=speed,
        share=case.share,
        of="layer",
    )


def _time_of(facts: Facts, path: str) -> float:
    rows = [row for row in facts.profile.rows if row.module == path]
    return sum(facts.profile.share(row) for row in rows)


def _costliest(
    facts: Facts, calls: Sequence[LayerCall], breaks: Callable[[Any], bool]
) -> LayerCall | None:
    """Return the call, of a convolution that breaks a guideline, with the most time."""
    breaking = [
        call
        for call in calls
        if isinstance(call.module, CONVOLUTIONS) and breaks(call.module)
    ]
    return max(breaking, key=lambda call: _time_of(facts, call.path), default=None)


def _equal_channels(facts: Facts, calls: Sequence[LayerCall]) -> _Case | None:
    """G1: of all shapes with the same work, that with equal channels moves least."""
    call = _costliest(facts, calls, _is_unequal)
    if call is None:
        return None
    layer: Any = call.module
    inputs = layer.in_channels
    outputs = layer.out_channels
    middle = max(1, round(math.sqrt(inputs * outputs)))
    return _Case(
        name="equal_channels",
        seen=f"a 1×1 convolution from {inputs} to {outputs} channels; one from {middle} "
        f"to {middle} has the same work",
        place=call.path,
        do="let the channels in and out be alike",
        why="at the same work equal channels move the fewest bytes",
        number="G1",
        unchanged=_layer(call, layer.in_channels, layer.out_channels, 1),
        changed=_layer(call, middle, middle, 1),
        share=_time_of(facts, call.path),
    )


def _is_unequal(layer: Any) -> bool:
    is_pointwise = set(layer.kernel_size) == {1} and layer.groups == 1
    channels = sorted((layer.in_channels, layer.out_channels))
    return is_pointwise and channels[1] >= UNEQUAL * channels[0]


def _groups(facts: Facts, calls: Sequence[LayerCall]) -> _Case | None:
    """G2: groups move more bytes for the same work."""
    call = _costliest(facts, calls, _is_grouped)
    if call is None:
        return None
    layer: Any = call.module
    shrink = math.sqrt(layer.groups)
    inputs = max(1, round(layer.in_channels / shrink))
    outputs = max(1, round(layer.out_channels / shrink))
    return _Case(
        name="group_convolutions",
        seen=f"a convolution in {layer.groups} groups from {layer.in_channels} to "
        f"{layer.out_channels} channels; one without groups from {inputs} to {outputs} "
        "has the same work",
        place=call.path,
        do="fewer groups and fewer channels",
        why="groups move more bytes for the same work",
        number="G2",
        unchanged=_layer(call, layer.in_channels, layer.out_channels, layer.groups),
        changed=_layer(call, inputs, outputs, 1),
        share=_time_of(facts, call.path),
    )


def _is_grouped(layer: Any) -> bool:
    """Return True for groups; depthwise convolutions are a kind of their own."""
    return bool(1 < layer.groups < layer.in_channels)


def _layer(
    call: LayerCall, inputs: int, outputs: int, groups: int
) -> Callable[[], Any]:
    """Return a call of a convolution like the layer's, with other channels."""
    layer: Any = call.module
    weight = layer.weight
    other = type(layer)(
        inputs,
        outputs,
        layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=groups,
        bias=layer.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    axis = len(call.shape) - len(layer.kernel_size) - 1
    shape = list(call.shape)
    shape[axis] = inputs
    x = torch.randn(shape, device=weight.device, dtype=call.dtype)
    return lambda: other(x)


def _fragments(facts: Facts, calls: Sequence[LayerCall]) -> _Case | None:
    """G3: many small layers of one input; as one layer they compute the same."""
    groups = [group for group in _alike(calls) if len(group) >= FRAGMENTS]
    if not groups:
        return None
    group = max(groups, key=lambda g: sum(_time_of(facts, c.path) for c in g))
    weight: Any = group[0].module.weight
    x = torch.randn(group[0].shape, device=weight.device, dtype=group[0].dtype)
    layers: list[Any] = [call.module for call in group]
    joined = _joined(layers)
    return _Case(
        name="fragmentation",
        seen=f"{len(group)} layers of one shape read the same input; as one layer they "
        "compute the same",
        place=f"{group[0].path} … {group[-1].path}",
        do="one layer with the channels of all, and split or chunk its result",
        why="each small kernel has its own start, and keeps fewer units busy",
        number="G3",
        unchanged=lambda: [layer(x) for layer in layers],
        changed=lambda: joined(x).chunk(len(layers), 1 if x.dim() > 3 else -1),
        share=sum(_time_of(facts, call.path) for call in group),
        reason="the weights are put together by hand; values stay as they are",
    )


def _alike(calls: Sequence[LayerCall]) -> Iterator[list[LayerCall]]:
    """Yield the layers that read one input and have one kind and shape."""
    groups: dict[tuple[object, ...], list[LayerCall]] = defaultdict(list)
    for call in calls:
        layer: Any = call.module
        details = tuple(
            getattr(layer, name, None)
            for name in ("kernel_size", "stride", "padding", "dilation", "groups")
        )
        has_groups = getattr(layer, "groups", 1) != 1
        if not has_groups:
            key = (call.source, type(layer), layer.weight.shape[1:], details)
            groups[key].append(call)
    yield from groups.values()


def _joined(layers: Sequence[Any]) -> nn.Module:
    first = layers[0]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias for layer in layers]
    bias = None
    if all(isinstance(b, Tensor) for b in biases):
        bias = torch.cat([b.detach() for b in biases])
    if isinstance(first, nn.Linear):
        joined: Any = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    else:
        joined = type(first)(
            first.in_channels,
            weight.shape[0],
            first.kernel_size,
            stride=first.stride,
            padding=first.padding,
            dilation=first.dilation,
            bias=bias is not None,
        )
    joined.weight = nn.Parameter(weight)
    if bias is not None:
        joined.bias = nn.Parameter(bias)
    module: nn.Module = joined
    return module


def _elementwise(facts: Facts, calls: Sequence[LayerCall]) -> _Case | None:
    """G4: element-wise operators do little work and move much."""
    del calls
    rows = [row for row in facts.counts.rows if _is_elementwise(row)]
    share = sum(_share(facts, row) for row in rows)
    if share < ELEMENTWISE_SHARE:
        return None
    module = max({row.module for row in rows}, key=lambda m: _in_module(facts, rows, m))
    inside = [row for row in rows if row.module == module and row.phase == "forward"]
    if not inside:
        return None
    passes = sum(row.calls for row in inside)
    shape = max(inside, key=lambda row: row.bytes_moved).shape
    return _Case(
        name="elementwise_share",
        seen=f"element-wise operators take {share:.0%} of the step; "
        f"{module or 'the model'} makes {passes} passes over {shape} elements, here "
        "timed against a single one",
        place=module,
        do="fewer of them, in place, or fused by torch.compile",
        why="they do little work and move every element",
        number="G4",
        unchanged=_passes(shape, passes, facts.device),
        changed=_passes(shape, 1, facts.device),
        share=share,
        reason="which of them can go is the author's to say",
    )


def _passes(shape: str, number: int, device: torch.device) -> Callable[[], None]:
    """Return a call of element-wise operators on tensors of a shape, one after
    another."""
    x = torch.randn([int(size) for size in shape.split("×")], device=device)
    result = torch.empty_like(x)

    def run() -> None:
        for _ in range(number):
            torch.mul(x, 1.0001, out=result)

    return run


def _is_elementwise(row: OperatorCount) -> bool:
    is_model = row.phase != "optimizer" and row.kind == "elementwise"
    return is_model and bool(row.flops) and bool(row.shape)


def _share(facts: Facts, row: OperatorCount) -> float:
    return sum(
        facts.profile.share(time)
        for time in facts.profile.rows
        if (time.operator, time.module, time.phase)
        == (row.operator, row.module, row.phase)
    )


def _in_module(facts: Facts, rows: Sequence[OperatorCount], module: str) -> float:
    return sum(_share(facts, row) for row in rows if row.module == module)
