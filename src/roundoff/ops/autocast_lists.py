"""What torch.autocast does with each operator on each kind of device, asked from torch itself.

The lists are compiled into torch, one set a device, and differ: on a CPU softmax,
layer_norm, exp and sum are on no list and stay in half precision where their input is,
on CUDA they run in fp32. Which operators have an autocast kernel is read from torch's
dispatcher, so it is right for the version that runs; of which kind it is stands in the
table of operators (torch's ``ATen/autocast_mode.h``, AT_FORALL_LOWER_PRECISION_FP and
AT_FORALL_PROMOTE, and the CPU's registrations).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch

from roundoff.errors import PlanError
from roundoff.ops.table import facts, operators_that

AutocastClass = Literal["lower", "fp32", "promote", "follow"]

#: The autocast dispatch key of each device type.
AUTOCAST_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "mtia": "AutocastMTIA",
    "privateuseone": "AutocastPrivateUse1",
}

#: What is said of fp16 on such a CPU (measured on GPT-2 and ResNet-18 steps).
SLOW_FP16 = (
    "fp16 on this CPU, which has no fp16 arithmetic: 16 to 32 times slower than fp32 was "
    "measured; bf16 is what a CPU trains in"
)


def slow_in_fp16(device: torch.device) -> bool:
    """Return True for a CPU without matrix arithmetic in fp16."""
    has_amx: Callable[[], bool] = getattr(
        torch.cpu, "_is_amx_fp16_supported", lambda: False
    )
    return device.type == "cpu" and not has_amx()


def autocast_class(operator: str, device: str = "cpu") -> AutocastClass:
    """Return what torch.autocast does with an operator (out of place) on a device.

    It runs it in the ``lower`` format, in ``fp32``, in the widest format of its inputs
    (``promote``), or leaves it alone (``follow``). ``operator`` is a site's operator or
    an aten name. Raises ``PlanError`` for a device without autocast.

    >>> devices = ("cpu", "cuda")
    >>> [autocast_class("softmax", device) for device in devices]
    ['follow', 'fp32']
    >>> autocast_class("linear"), autocast_class("add")
    ('lower', 'follow')
    """
    names = _names(device)
    for name in (operator, facts(operator).decided_by):
        if name is not None and name in names:
            return _class(name)
    return "follow"


def _class(name: str) -> AutocastClass:
    """What the list that has this operator is for."""
    if name in operators_that("promote under autocast"):
        return "promote"
    # a parametric ReLU is on the list of products
    return "lower" if facts(name).multiplies or name == "prelu" else "fp32"


def autocast_differences(
    device: str, other: str
) -> dict[str, tuple[AutocastClass, AutocastClass]]:
    """Return the operators that two devices treat differently: operator to (device's, other's)."""
    names = sorted(_names(device) | _names(other))
    pairs = {
        name: (autocast_class(name, device), autocast_class(name, other))
        for name in names
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@functools.cache
def _names(device: str) -> frozenset[str]:
    key = AUTOCAST_KEYS.get(device)
    if key is None:
        raise PlanError(
            "no autocast on such a device",
            where="device",
            expected=", ".join(AUTOCAST_KEYS),
            got=repr(device),
        )
    return frozenset(
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    )
