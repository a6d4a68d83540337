"""Which quantized calls run as integer kernels in ONNX Runtime, and why others do not."""

from __future__ import annotations

from dataclasses import dataclass

from roundoff.export.onnx.deployed import Deployed
from roundoff.export.onnx.runtime import Kernels, is_integer
from roundoff.ops import facts
from roundoff.quantize import (
    CLIPS,
    QuantizedModel,
    Quantizer,
    Route,
    is_as_quick_in_floats,
)

#: Kinds of calls for which ONNX Runtime's CPU has no kernel on codes.
_NO_KERNEL = {
    "attention": "attention is exported as its matrix products and softmax, in fp32",
    "rnn": "recurrent layers compute in fp32 in ONNX, with weights stored as codes",
    "embedding": "a look-up does no arithmetic: its table is stored as codes",
}
#: Operators of ONNX that only move codes.
_MOVES = frozenset(
    {"MaxPool", "NhwcMaxPool", "Resize", "Reshape", "Transpose", "Concat", "Gather"}
)
_ROUNDS = (
    "MatMulNBits rounds its activations to 8 bits, which the simulation does not, unless the session has "
    "session.qdq_matmulnbits_accuracy_level = 1"
)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One quantized call in the file.

    Attributes:
        site: path of the call.
        kernel: kernels that ONNX Runtime runs for it.
        integer: they compute with integers, went into the kernel of the call before (a
            ReLU), or only move codes.
        reason: why they do not, or what to know.
    """

    site: str
    kernel: str
    integer: bool
    reason: str = ""


def became(
    quantized: QuantizedModel, deployed: Deployed, kernels: Kernels
) -> tuple[KernelRow, ...]:
    """Return one row for each quantized call, in the order of the model."""
    return tuple(
        _row(site, route, quantized, deployed, kernels)
        for site, route in quantized.routes.items()
    )


def _row(
    site: str,
    route: Route,
    quantized: QuantizedModel,
    deployed: Deployed,
    kernels: Kernels,
) -> KernelRow:
    operators = [op for name, op in kernels.nodes if _is_named_after(name, site)]
    integer = [op for op in operators if is_integer(op)]
    operator = _operator(site)
    if integer:
        remark = _ROUNDS if "MatMulNBits" in integer else ""
        return KernelRow(site, _listing(integer), True, remark)
    if not operators and operator in CLIPS:
        return KernelRow(site, "", True, "in the kernel before it")
    if operators and _MOVES.issuperset(operators) and operator != "embedding":
        return KernelRow(site, ", ".join(operators), True, "moves codes")
    why = _why_not_integer(site, route, quantized, deployed)
    return KernelRow(site, _listing(operators), False, why)


def _listing(operators: list[str]) -> str:
    return ", ".join(dict.fromkeys(operators))


def _operator(site: str) -> str:
    """Return the operator of a site: ``conv2d`` of ``a/conv2d#1``."""
    return site.rpartition("/")[2].partition("#")[0]


def _is_named_after(name: str, site: str) -> bool:
    """Return True for nodes of a site: ``site``, ``site:Op``, ``site_token_3`` (moved)."""
    if not name.startswith(site):
        return False
    suffix = name[len(site) :]
    return not suffix or suffix.startswith((":", "_token", "_nchwc", "_fused", "/"))


def _why_not_integer(
    site: str, route: Route, quantized: QuantizedModel, deployed: Deployed
) -> str:
    """Return the first reason that applies, from what a call reads to what it writes."""
    names = [*route.uses.values(), *([route.output] if route.output else [])]
    for name in names:
        reason = deployed.reasons.get(name) or deployed.slow.get(name)
        if reason is not None:
            return reason
    return (
        _no_kernel(site, route, quantized)
        or _split_by_clip(site, route, quantized, names)
        or _no_codes_written(site, route, quantized)
        or "ONNX Runtime did not make one of it"
    )


def _no_kernel(site: str, route: Route, quantized: QuantizedModel) -> str | None:
    """Return why there is no kernel on codes for such a call at all."""
    operator = _operator(site)
    if route.executes is not None:
        return f"{route.executes.name} is exported as fp32: it has no codes"
    if operator.startswith("max_pool"):
        return "its codes have another scale than those that it reads, so they are made anew"
    if operator.startswith("conv_transpose"):
        return "ONNX Runtime has no integer kernel for transposed convolutions, and this one is written as no other"
    kind = facts(operator).kind
    if kind in _NO_KERNEL:
        return _NO_KERNEL[kind]
    readers = [quantized.quantizer(name) for name in route.uses.values()]
    if readers and all(reader.weight for reader in readers):
        return "weights alone are quantized: the product is of floating-point numbers"
    return None


def _split_by_clip(
    site: str, route: Route, quantized: QuantizedModel, names: list[str]
) -> str | None:
    """Return why a clip of codes of few bits keeps the kernels apart."""
    quantizers = [quantized.quantizer(name) for name in names]
    clip = _clip_behind(site, route, quantized)
    if clip is not None:
        quantizers.append(clip)
    for quantizer in quantizers:
        if quantizer.fmt.width < 8 and not quantizer.weight:
            return f"{quantizer.fmt.name} needs a clip before its codes, which keeps the kernels apart"
    return None


def _no_codes_written(site: str, route: Route, quantized: QuantizedModel) -> str | None:
    """Return why the result does not reach the next quantizer as the kernel writes it."""
    operator = _operator(site)
    if operator in ("add", "mul") and len(route.uses) < 2:
        return "one of its operands is a number, for which ONNX Runtime has no kernel on codes"
    if not facts(operator).operands or route.output:
        return None
    clip = _clip_behind(site, route, quantized)
    node = quantized.graph.nodes.get(site)
    if node is not None and is_as_quick_in_floats(node):
        return "nothing reads codes of its result, which is not rounded: with so few products fp32 is as fast"
    if clip is None:
        return "its result is no code: a float reads it too, or a clip stands between"
    if clip.zero_point is None:
        return "symmetric codes have a sign, which the ReLU or clip behind it never uses: the clip had to stay"
    return "the scale behind the ReLU6 or clip reaches beyond its bound: the clip had to stay"


def _clip_behind(
    site: str, route: Route, quantized: QuantizedModel
) -> Quantizer | None:
    """Return the quantizer of the clip that comes next in the model, behind a product."""
    if not facts(_operator(site)).operands or route.output:
        return None
    order = [row.site for row in quantized.rows]
    following = order[order.index(site) + 1] if site in order[:-1] else ""
    if _operator(following) not in CLIPS:
        return None
    return next((q for name, q in quantized.named() if name == following), None)
