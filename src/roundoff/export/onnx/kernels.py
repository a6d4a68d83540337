"""Which quantized calls run as integer kernels in ONNX Runtime, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roundoff.export.onnx.deployed import Deployed
from roundoff.export.onnx.runtime import Kernels, is_integer
from roundoff.ops import facts
from roundoff.quantize import CLIPS, QuantizedModel, Route

#: Kinds of calls for which ONNX Runtime's CPU has no kernel on codes.
_NO_KERNEL = {
    "attention": "attention is exported as its matrix products and softmax, in fp32",
    "rnn": "recurrent layers stay in fp32 in ONNX",
    "embedding": "a look-up does no arithmetic: its table is stored as codes",
}

_ROUNDS = (
    "MatMulNBits rounds its activations to 8 bits, which the simulation does not, unless the session has "
    "session.qdq_matmulnbits_accuracy_level = 1"
)


@dataclass(frozen=True)
class KernelRow:
    """One quantized call in the file: the kernel that ONNX Runtime runs for it, and why it is not one with integers.

    ``integer`` also holds for calls that went into the kernel of the call before (a ReLU), or that only move codes.
    """

    site: str
    kernel: str
    integer: bool
    reason: str = ""


def became(
    quantized: QuantizedModel, deployed: Deployed, found: Kernels
) -> tuple[KernelRow, ...]:
    """One row for each quantized call, in the order of the model."""
    rows = []
    for site, route in quantized.routes.items():
        own = [op for name, op in found.nodes if _belongs(name, site)]
        integer = [op for op in own if is_integer(op)]
        operator = site.rpartition("/")[2].partition("#")[0]
        if integer:
            said = _ROUNDS if "MatMulNBits" in integer else ""
            rows.append(KernelRow(site, ", ".join(dict.fromkeys(integer)), True, said))
        elif not own and operator in CLIPS:
            rows.append(KernelRow(site, "", True, "in the kernel before it"))
        elif (
            own
            and set(own) <= {"MaxPool", "Reshape", "Transpose", "Concat", "Gather"}
            and operator != "embedding"
        ):
            rows.append(KernelRow(site, ", ".join(own), True, "moves codes"))
        else:
            why = _why(site, operator, route, quantized, deployed)
            rows.append(KernelRow(site, ", ".join(dict.fromkeys(own)), False, why))
    return tuple(rows)


def _belongs(name: str, site: str) -> bool:
    """Whether a node of the optimised graph is named after a site: ``site``, ``site:Op``, ``site_token_3`` (moved)."""
    rest = name[len(site) :]
    return name.startswith(site) and (
        not rest
        or rest[0] == ":"
        or rest.startswith(("_token", "_nchwc", "_fused", "/"))
    )


def _why(
    site: str,
    operator: str,
    route: Route,
    quantized: QuantizedModel,
    deployed: Deployed,
) -> str:
    names = [*route.uses.values(), *([route.output] if route.output else [])]
    for name in names:
        known = deployed.reasons.get(name) or deployed.slow.get(name)
        if known is not None:
            return known
    if route.executes is not None:
        return f"{route.executes.name} is exported as fp32: it has no codes"
    if operator.startswith("max_pool"):
        return "its codes have another scale than those that it reads, so they are made anew"
    if operator.startswith("conv_transpose"):
        return "ONNX Runtime has no integer kernel for transposed convolutions"
    kind = facts(operator).kind
    if kind in _NO_KERNEL:
        return _NO_KERNEL[kind]
    readers = [quantized.quantizer(name) for name in route.uses.values()]
    weights = [q for q in readers if q.weight]
    if weights and len(weights) == len(readers):
        return "weights alone are quantized: the product is of floating-point numbers"
    after = (
        _clipped_after(site, quantized)
        if facts(operator).operands and not route.output
        else None
    )
    read_or_written = [quantized.quantizer(name) for name in names]
    for quantizer in read_or_written if after is None else [*read_or_written, after]:
        if quantizer.fmt.width < 8 and not quantizer.weight:
            return f"{quantizer.fmt.name} needs a clip before its codes, which keeps the kernels apart"
    if operator in ("add", "mul") and len(route.uses) < 2:
        return "one of its operands is a number, for which ONNX Runtime has no kernel on codes"
    if facts(operator).operands and not route.output:
        if after is not None and after.zero_point is None:
            return "symmetric codes have a sign, which the ReLU or clip behind it never uses: the clip had to stay"
        if after is not None:
            return "the scale behind the ReLU6 or clip reaches beyond its bound: the clip had to stay"
        return "its result is no code: a float reads it too, or a clip stands between"
    return "ONNX Runtime did not make one of it"


def _clipped_after(site: str, quantized: QuantizedModel) -> Any:
    """The quantizer of the clip that comes next in the model, if what comes next is one."""
    order = [row.site for row in quantized.rows]
    following = order[order.index(site) + 1] if site in order[:-1] else ""
    if following.rpartition("/")[2].partition("#")[0] not in CLIPS:
        return None
    return next((q for name, q in quantized.named() if name == following), None)
