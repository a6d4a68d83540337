"""Run a workload with a plan applied: every site in its format, simulated or native,
and measure what comes out.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from roundoff.errors import NonFiniteError, WorkloadError
from roundoff.formats import Format, parse_format
from roundoff.ops import Call, execute, float_tensors, runs, watch
from roundoff.plan.output_noise import powers
from roundoff.preserve import preserve, same_draws
from roundoff.workload import Workload, named_tensors, target_tensors


class Plain:
    """The handler that runs every call as it is, and remembers the sites."""

    def __init__(self) -> None:
        self.sites: dict[str, str] = {}
        self.wanted: str | None = None
        self.site_output: Tensor | None = None

    def call(self, call: Call) -> Any:
        """Run the call."""
        result = self.run(call)
        outputs = float_tensors(result)
        if outputs:
            self.sites[str(call.site)] = call.kind
            if str(call.site) == self.wanted and self.site_output is None:
                self.site_output = outputs[0].clone()
        return result

    def run(self, call: Call) -> Any:
        """The call's result."""
        return call.run()

    def before_write(self, tensor: Tensor) -> None:
        """Nothing is held."""


class Rounded(Plain):
    """The handler that runs each site in its format; ``native`` uses real casts where
    the device has the format.
    """

    def __init__(self, formats: Mapping[str, Format], native: bool = False) -> None:
        super().__init__()
        self.formats = formats
        self.native = native
        self.how: Counter[str] = Counter()

    def run(self, call: Call) -> Any:
        """The call's result in the format of its site."""
        fmt = self.formats.get(str(call.site))
        if fmt is None or runs(call, fmt) is not None:
            return call.run()
        if self.native:
            result = _native(call, fmt)
            if result is not None:
                self.how["native"] += 1
                return result
        self.how["simulated"] += 1
        return execute(call, fmt)


def _native(call: Call, fmt: Format) -> Any:
    """The call with its operands really cast, None where this device or operator has no
    such arithmetic.
    """
    dtype = _native_dtype(call, fmt)
    if dtype is None:
        return None
    leaves = [_float_to(value, dtype) for value in call.leaves]
    try:
        result = dataclasses.replace(call, leaves=leaves).run()
    except (RuntimeError, TypeError):
        # "not implemented for 'BFloat16'": this operator has no such kernel
        return None
    dtype_before = float_tensors(call.leaves)[0].dtype
    return tree_map(lambda value: _float_to(value, dtype_before), result)


def _native_dtype(call: Call, fmt: Format) -> torch.dtype | None:
    rule = fmt.execution
    if rule is None or not rule.output:
        return None
    if call.operator.inplace or call.kind == "embedding":
        return None
    dtype = fmt.torch_dtype
    on_cpu = any(t.device.type == "cpu" for t in float_tensors(call.leaves))
    if dtype == torch.float16 and on_cpu:
        # CPUs convert fp16 to fp32 and back, slowly: that is a simulation too
        return None
    return dtype


def _float_to(value: Any, dtype: torch.dtype) -> Any:
    """``value`` in another dtype where it is a floating-point tensor."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


@dataclass(frozen=True)
class Ran:
    """One evaluation of a workload: the output of each batch, the target tensors in it,
    and the handler used.
    """

    outputs: list[Any]
    targets: list[dict[str, Tensor]]
    handler: Plain


def run_batches(
    workload: Workload,
    formats: Mapping[str, str] | None = None,
    *,
    target: str | None = None,
    native: bool = False,
    progress: Callable[[int, int], None] | None = None,
    batches: slice = slice(None),
) -> Ran:
    """Evaluate every batch without gradients, in evaluation mode, with ``formats``
    applied (site to format; the plain model when None). ``target`` is a part of the
    output, ``"loss"`` or a site. The model is left as it was.
    """
    parsed = {site: parse_format(name) for site, name in (formats or {}).items()}
    handler = Plain() if formats is None else Rounded(formats=parsed, native=native)
    handler.wanted = target if target is not None and "/" in target else None
    ran = Ran([], [], handler)
    chosen = workload.batches[batches]
    with preserve(workload.model), same_draws(), torch.no_grad():
        workload.model.eval()
        with watch(workload.model, handler) as mode:
            for index, batch in enumerate(chosen):
                mode.begin()
                handler.site_output = None
                with mode:  # the operators of the loss are sites too
                    output = workload.run(batch)
                    targets = named_targets(
                        workload, batch, output, target, handler.site_output
                    )
                ran.outputs.append(detached(output))
                ran.targets.append(targets)
                if progress is not None:
                    progress(index + 1, len(chosen))
    return ran


def named_targets(
    workload: Workload,
    batch: Any,
    output: Any,
    target: str | None,
    site_output: Tensor | None,
) -> dict[str, Tensor]:
    """The target tensors of one batch: the output or a part of it, the loss, or what a
    site returned.

    ``loss`` is the workload's own, or else the part of the output of that name. No
    target is what the workload is judged by.

    Raises ``WorkloadError`` when there is no such part or site.
    """
    if target is not None and "/" in target:
        if site_output is None:
            raise WorkloadError(
                f"no site named {target!r} was called",
                where="of",
                expected="a site of this model",
                got=repr(target),
                do="take a name from the ranked table",
            )
        return {target: site_output}
    if target == "loss" and (workload.loss or "loss" not in named_tensors(output)):
        if workload.loss is None:
            raise WorkloadError(
                "the target is the loss, and the workload has none",
                where=workload.name,
                do="define loss(output, batch) in the workload, or give the labels in the batches",
            )
        return {"loss": workload.loss(output, batch)}
    judged = workload.judged
    return target_tensors(output, target or judged.part, judged.apart)


def noise(
    candidate: list[dict[str, Tensor]], reference: list[dict[str, Tensor]]
) -> float:
    """Relative noise power ``sum |z' - z|^2 / sum |z|^2`` over all batches, accumulated in float64.

    Compared is where both have an output of one shape, and where the reference is
    finite (masked logits are -inf). Infinite when the candidate holds NaN or Inf there;
    NaN when nothing can be compared, since the data decide how many rows an output has.
    """
    error = signal = 0.0
    compared = False
    for got, want in zip(candidate, reference, strict=True):
        for name, exact in want.items():
            if name not in got or got[name].shape != exact.shape:
                continue
            compared = True
            difference, power = powers(got[name], exact)
            error += difference
            signal += power
    if not compared:
        return math.nan
    return error / signal if math.isfinite(error) and signal else math.inf


def detached(output: Any) -> Any:
    """The output with every floating-point tensor detached from the graph, in a
    container of the same kind.
    """
    return replaced(output, lambda t: t.detach())


def replaced(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of ``output`` whose floating-point tensors are ``change`` of the original ones."""
    if isinstance(output, Tensor):
        return change(output) if output.is_floating_point() else output
    if isinstance(output, MutableMapping):
        # first, because Hugging Face's outputs are mappings and dataclasses
        twin = copy.copy(output)
        for key, value in output.items():
            twin[key] = replaced(value, change)
        return twin
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output) if field.init]
        parts = {name: replaced(getattr(output, name), change) for name in names}
        return dataclasses.replace(output, **parts)
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(replaced(v, change) for v in output))
    if isinstance(output, list | tuple):
        return type(output)(replaced(v, change) for v in output)
    return output


class _FirstNonFinite(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def run(self, call: Call) -> Any:
        result = call.run()
        if self.first is None and _holds_nan(result):
            self.first = str(call.site)
        return result


def _holds_nan(result: Any) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in float_tensors(result))


def check_finite(workload: Workload, index: int, targets: Mapping[str, Tensor]) -> None:
    """Raise ``NonFiniteError`` naming the first site that made a NaN, when a target
    tensor is not finite.
    """
    bad = {name: t for name, t in targets.items() if not bool(t.isfinite().all())}
    if not bad:
        return
    search = _FirstNonFinite()
    with watch(workload.model, search) as mode, torch.no_grad(), mode:
        workload.run(workload.batches[index])
    counts = ", ".join(
        f"{n}: {int((~t.isfinite()).sum())} of {t.numel()} elements"
        for n, t in bad.items()
    )
    origin = "no NaN inside, only Inf"
    if search.first:
        origin = f"the first NaN is made by {search.first}"
    raise NonFiniteError(
        "the run before any rounding already holds NaN or Inf",
        where=f"{workload.name}, batch {index}",
        expected="finite values in the reference",
        got=f"{counts}; {origin}",
        do="check the weights and the input of that operator",
    )
