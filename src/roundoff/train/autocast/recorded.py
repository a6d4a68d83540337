"""The full mode: simulated formats, and a record of what ran in which format, casts and backward pass included.

Where the light mode only casts, this one knows every operand of every call (``capture.calls``), so it can run formats that
the device has not, and see below each call what torch made of it. It runs compiled modules uncompiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roundoff.formats import parse_format
from roundoff.ops import Call, float_tensors, runs
from roundoff.train.autocast.mode import LOCAL, cast, run_in
from roundoff.train.autocast.rules import NATIVE, Rules
from roundoff.train.autocast.simulate import simulated

_CASTS = frozenset({"_to_copy", "to"})
_SHORT = {dtype: name for name, dtype in NATIVE.items()}


@dataclass
class Ran:
    """What one call was made of: formats of its inputs, of the kernels that computed, and of its output; how many tensors
    were cast for it and their bytes; the format of the gradient that arrived, and the casts on the way back."""

    site: str
    operator: str
    rule: str
    asked: str
    inputs: str = ""
    ran: str = ""
    output: str = ""
    casts: int = 0
    cast_bytes: int = 0
    backward: str = ""
    backward_casts: int = 0
    note: str = ""


@dataclass
class Recorded:
    """The handler of ``capture.calls.watch`` that follows ``rules`` and keeps a row for each call if ``record``."""

    rules: Rules
    record: bool
    rows: list[Ran] = field(default_factory=list)

    def call(self, call: Call) -> Any:
        """Run the call as its rule says."""
        inner = LOCAL.keys[-1] != self.rules.key  # a region inside this one decides
        if inner or getattr(call.func, "__name__", "") == "__get__":
            return call.run()
        if not self.record:
            return self._run(call)[0]
        site = str(call.site)
        decision = self.rules.decide(site)
        rule = "" if decision.pattern is None else decision.pattern
        row = Ran(
            site,
            call.operator.name,
            rule,
            decision.format or f"autocast {_short(self.rules.dtype)}",
        )
        row.inputs = _formats(float_tensors(call.leaves))
        with _Kernels() as kernels:
            result, row.note = self._run(call)
        outputs = float_tensors(result)
        if not outputs:
            return result
        row.output = _formats(outputs)
        row.ran = (
            " + ".join(dict.fromkeys(_short(d) for d in kernels.computed)) or row.output
        )
        row.casts, row.cast_bytes = kernels.casts, kernels.bytes
        self._follow(row, call, outputs)
        self.rows.append(row)
        return result

    def before_write(self, tensor: Tensor) -> None:
        """Nothing is held."""

    def _run(self, call: Call) -> tuple[Any, str]:
        action = self.rules.action(str(call.site), call.operator.name)
        if action is None:
            return call.run(), ""
        if call.operator.inplace:
            return call.run(), "in place: the format of what it writes into"
        args, kwargs = call.arguments()
        if not isinstance(action, str) or action in ("follow", "promote"):
            return run_in(
                call.func, call.operator.name, args, kwargs, action, self.rules.device
            ), ""
        fmt = parse_format(action)
        why = runs(call, fmt)
        wide = Call(
            call.site,
            call.operator,
            call.func,
            [cast(v, torch.float32) for v in call.leaves],
            call.layout,
            call.operands,
        )
        with torch.autocast(self.rules.device, enabled=False):
            return (
                (wide.run(), why)
                if why
                else (simulated(wide, fmt), f"{fmt.name} simulated")
            )

    def _follow(self, row: Ran, call: Call, outputs: list[Tensor]) -> None:
        first = outputs[0]
        if first.grad_fn is None:
            return
        before = {
            t.grad_fn for t in float_tensors(call.leaves) if t.grad_fn is not None
        }
        row.backward_casts = _count_casts(first.grad_fn, before)

        def seen(gradient: Tensor) -> None:
            row.backward = _short(gradient.dtype)

        first.register_hook(seen)  # type: ignore[no-untyped-call]

    @property
    def table(self) -> pl.DataFrame:
        """One row per call, in order; ``backward`` fills during the backward pass."""
        names = Ran.__dataclass_fields__
        schema = {
            n: pl.Int64 if n in ("casts", "cast_bytes", "backward_casts") else pl.String
            for n in names
        }
        return pl.DataFrame(
            [[getattr(row, n) for n in names] for row in self.rows],
            schema=schema,
            orient="row",
        )


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The casts and computing kernels that run beneath one call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = self.bytes = 0
        self.computed: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = float_tensors(args)
        outputs = float_tensors(result)
        name = func._schema.name.removeprefix("aten::")
        if name in _CASTS:
            if inputs and outputs and inputs[0].dtype != outputs[0].dtype:
                self.casts += 1
                self.bytes += outputs[0].nbytes
        elif inputs and outputs and not func.is_view:
            wide = outputs[0].dtype
            self.computed.append(
                wide if any(t.dtype == wide for t in inputs) else inputs[0].dtype
            )
        return result


def _count_casts(start: Any, before: set[Any]) -> int:
    """Casts between an operator's output and its operands, which the backward pass undoes."""
    found, seen, queue = 0, set(before), [start]
    while queue and len(seen) < 1000:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += node.name().startswith("ToCopyBackward")
        queue += [n for n, _ in node.next_functions]
    return found


def _formats(tensors: list[Tensor]) -> str:
    return " + ".join(dict.fromkeys(_short(t.dtype) for t in tensors))


def _short(dtype: torch.dtype | None) -> str:
    return (
        "fp32"
        if dtype is None
        else _SHORT.get(dtype, str(dtype).removeprefix("torch."))
    )
