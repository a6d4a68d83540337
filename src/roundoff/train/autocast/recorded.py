"""The full mode: simulated formats, and a record of what ran in which format, casts and
backward pass included.

Where the light mode only casts, this one knows every operand of every call (``ops.Call``),
so it can run formats that the device does not have, and see below each call what torch made
of it. It runs compiled modules uncompiled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roundoff.formats import parse_format
from roundoff.ops import Call, float_tensors, runs
from roundoff.plan import FOLLOW
from roundoff.train.autocast.mode import LOCAL, cast, run_in
from roundoff.train.autocast.rules import NATIVE, PROMOTE, Rules
from roundoff.train.autocast.simulate import simulated

_CASTS = frozenset({"_to_copy", "to"})
_NAMES = {dtype: name for name, dtype in NATIVE.items()}
#: Nodes of a graph that are searched for casts.
_SEARCHED = 1000


@dataclass
class RanCall:
    """How one call ran.

    Attributes:
        site: the call.
        operator: its operator.
        rule: the pattern that decided; empty where none did.
        asked: the format that it asked for.
        inputs: formats of the inputs.
        ran: formats of the kernels that computed.
        output: format of the output.
        casts: number of tensors that were cast for it.
        cast_bytes: their bytes.
        backward: format of the gradient that arrived; empty as long as none did.
        backward_casts: number of casts on the way back.
        note: what else to know.
    """

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


SCHEMA = {
    column.name: pl.Int64 if column.type == "int" else pl.String
    for column in fields(RanCall)
}


@dataclass
class Recorded:
    """The handler of ``ops.watch`` that follows ``rules`` and, with ``record``, keeps a
    row for each call.
    """

    rules: Rules
    record: bool
    rows: list[RanCall] = field(default_factory=list)

    def call(self, call: Call) -> Any:
        """Run the call as its rule says."""
        is_inner = LOCAL.keys[-1] != self.rules.key  # a region inside this one decides
        if is_inner or getattr(call.func, "__name__", "") == "__get__":
            return call.run()
        if self.record:
            return self._run_recorded(call)
        result, _ = self._run(call)
        return result

    def before_write(self, tensor: Tensor) -> None:
        """Do nothing: no tensor is kept."""

    def _run_recorded(self, call: Call) -> Any:
        row = self._row(call)
        with _KernelRecorder() as kernels:
            result, row.note = self._run(call)
        outputs = float_tensors(result)
        if not outputs:
            return result
        row.output = _formats([output.dtype for output in outputs])
        row.ran = _formats(kernels.computed) or row.output
        row.casts = kernels.casts
        row.cast_bytes = kernels.bytes
        _follow_backward(row, call, outputs[0])
        self.rows.append(row)
        return result

    def _row(self, call: Call) -> RanCall:
        site = str(call.site)
        decision = self.rules.decide(site)
        inputs = float_tensors(call.leaves)
        return RanCall(
            site,
            call.operator.name,
            rule=decision.pattern or "",
            asked=decision.format or f"autocast {_name(self.rules.dtype)}",
            inputs=_formats([tensor.dtype for tensor in inputs]),
        )

    def _run(self, call: Call) -> tuple[Any, str]:
        """Run a call; return its result and a note."""
        operator = call.operator.name
        action = self.rules.action(str(call.site), operator)
        if action is None:
            return call.run(), ""
        if call.operator.inplace:
            return call.run(), "in place: the format of what it writes into"
        if not isinstance(action, str) or action in (FOLLOW, PROMOTE):
            args, kwargs = call.arguments()
            device = self.rules.device
            return run_in(call.func, operator, args, kwargs, action, device), ""
        # in fp32, not in the region's autocast
        leaves = [cast(value, torch.float32) for value in call.leaves]
        wide = replace(call, leaves=leaves, autocast=None)
        fmt = parse_format(action)
        refusal = runs(call, fmt)
        with torch.autocast(self.rules.device, enabled=False):
            if refusal:
                return wide.run(), refusal
            return simulated(wide, fmt), f"{fmt.name} simulated"

    @property
    def table(self) -> pl.DataFrame:
        """One row per call, in order; ``backward`` fills during the backward pass."""
        return pl.DataFrame([asdict(row) for row in self.rows], schema=SCHEMA)


def _follow_backward(row: RanCall, call: Call, output: Tensor) -> None:
    """Note the gradient that arrives at an output, and the casts on its way back."""
    if output.grad_fn is None:
        return
    operands = {t.grad_fn for t in float_tensors(call.leaves)} - {None}
    row.backward_casts = _count_casts(output.grad_fn, operands)

    def arrived(gradient: Tensor) -> None:
        row.backward = _name(gradient.dtype)

    output.register_hook(arrived)  # type: ignore[no-untyped-call]


class _KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The casts and computing kernels that run beneath one call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = 0
        self.bytes = 0
        self.computed: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = float_tensors(args)
        outputs = float_tensors(result)
        if inputs and outputs:
            self._note(func, [tensor.dtype for tensor in inputs], outputs[0])
        return result

    def _note(self, func: Any, inputs: list[torch.dtype], output: Tensor) -> None:
        if func._schema.name.removeprefix("aten::") in _CASTS:
            if inputs[0] != output.dtype:
                self.casts += 1
                self.bytes += output.nbytes
        elif not func.is_view:
            # a kernel that gives a wider output computed in the format of its inputs
            is_like_inputs = output.dtype in inputs
            self.computed.append(output.dtype if is_like_inputs else inputs[0])


def _count_casts(start: Any, operands: set[Any]) -> int:
    """Count casts between an operator's output and its operands, which the backward pass undoes."""
    casts = 0
    visited = set(operands)
    stack = [start]
    while stack and len(visited) < _SEARCHED:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        casts += node.name().startswith("ToCopyBackward")
        stack += [following for following, _ in node.next_functions]
    return casts


def _formats(dtypes: list[torch.dtype]) -> str:
    return " + ".join(dict.fromkeys(map(_name, dtypes)))


def _name(dtype: torch.dtype | None) -> str:
    if dtype is None:
        return "fp32"
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))
