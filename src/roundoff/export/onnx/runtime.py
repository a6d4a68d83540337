"""ONNX Runtime: run a file, read what became integer kernels in it, and race two files."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roundoff.errors import QuantizationError
from roundoff.export.onnx.export import needs

#: Operators whose sums are integers. ``MatMulNBits`` reads weights of 4 bits and adds
#: in fp32 or int8.
INTEGER = frozenset(
    {
        "QGemm",
        "ConvInteger",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
        "QAttention",
        "QEmbedLayerNormalization",
        "MatMulNBits",
        "QMoE",
        "ConvIntegerToFloat",
    }
)


@dataclass(frozen=True)
class Kernels:
    """What ONNX Runtime made of a file after its own optimisation.

    Attributes:
        counts: number of nodes of each operator in the optimised graph.
        nodes: name and operator of each node in it.
        between_codes: operators that compute in floats from codes, whose results become
            codes again.
    """

    counts: dict[str, int]
    nodes: tuple[tuple[str, str], ...]
    between_codes: tuple[str, ...] = ()

    @property
    def integer(self) -> dict[str, int]:
        """The operators of the graph that compute with integers."""
        return {name: count for name, count in self.counts.items() if is_integer(name)}


@dataclass(frozen=True)
class Latency:
    """Seconds of two files, run in turns on one thread.

    Attributes:
        reference, candidate: medians.
        ratio: median of reference / candidate: above 1 the candidate is faster.
        quartiles: lower and upper quartile of the ratios of neighbouring runs.
        runs: number of runs of each.
    """

    reference: float
    candidate: float
    ratio: float
    quartiles: tuple[float, float]
    runs: int


def is_integer(operator: str) -> bool:
    """Return True if an operator of ONNX Runtime computes with integers."""
    return operator.startswith("QLinear") or operator in INTEGER


def session(path: str | Path, optimised: str | Path | None = None) -> Any:
    """Open a file in ONNX Runtime on the CPU with one thread.

    Args:
        path: of the file.
        optimised: where to write the optimised graph; None: nowhere.

    Raises:
        QuantizationError: onnxruntime is missing, or does not take the file (with its
            words).
    """
    needs("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what it refuses is raised, with its words
    # without VNNI the usual kernels clip sums of two products to 16 bits
    options.add_session_config_entry("session.x64quantprecision", "1")
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    try:
        return onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's own classes have no public base
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        words = str(error).strip().splitlines()[0]
        raise QuantizationError(
            "ONNX Runtime cannot load this file",
            where=Path(path).name,
            got=words.replace(str(path), Path(path).name)[:300],
        ) from error


def run(ready: Any, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return all outputs of a session; inputs that the graph does not read are left out."""
    read = {value.name for value in ready.get_inputs()}
    outputs: list[np.ndarray] = ready.run(
        None, {name: array for name, array in inputs.items() if name in read}
    )
    return outputs


def kernels(path: str | Path) -> Kernels:
    """Read what ONNX Runtime makes of a file, from the optimised graph that it writes."""
    needs("onnx")
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "optimised.onnx"
        session(path, file)
        graph = onnx.load(str(file)).graph
    nodes = tuple((n.name, n.op_type) for n in graph.node)
    counts = dict(Counter(operator for _, operator in nodes))
    return Kernels(counts, nodes, _between_codes(graph))


def _between_codes(graph: Any) -> tuple[str, ...]:
    """Return the operators behind a DequantizeLinear and before a QuantizeLinear."""
    behind = _behind_codes(graph)
    before = _before_codes(graph)
    return tuple(
        node.op_type
        for node in graph.node
        if node.op_type != "DequantizeLinear"
        and not behind.isdisjoint(node.output)
        and not before.isdisjoint(node.output)
    )


def _behind_codes(graph: Any) -> set[str]:
    """Return the floats that are made of codes which the graph computes."""
    stored = {constant.name for constant in graph.initializer}
    values: set[str] = set()
    for node in graph.node:
        starts = node.op_type == "DequantizeLinear" and node.input[0] not in stored
        continues = not _makes_codes(node) and not values.isdisjoint(node.input)
        if starts or continues:
            values.update(node.output)
    return values


def _before_codes(graph: Any) -> set[str]:
    """Return the floats of which codes are made."""
    values: set[str] = set()
    for node in reversed(graph.node):
        ends = node.op_type == "QuantizeLinear"
        continues = not _makes_codes(node) and not values.isdisjoint(node.output)
        if ends or continues:
            values.update(node.input)
    return values


def _makes_codes(node: Any) -> bool:
    return node.op_type == "QuantizeLinear" or is_integer(node.op_type)


def latency(
    reference: str | Path,
    candidate: str | Path,
    inputs: dict[str, np.ndarray],
    seconds: float = 3.0,
    least: int = 15,
) -> Latency:
    """Race two files on the same inputs, in turns, after a warm-up.

    Each runs at least ``least`` times, and both for ``seconds`` together.
    """
    sessions = (session(reference), session(candidate))
    times: tuple[list[float], list[float]] = ([], [])
    for ready in sessions * 2:
        run(ready, inputs)
    end = time.perf_counter() + seconds
    while len(times[0]) < least or time.perf_counter() < end:
        for ready, taken in zip(sessions, times, strict=True):
            start = time.perf_counter()
            run(ready, inputs)
            taken.append(time.perf_counter() - start)
    ratios = np.array(times[0]) / np.array(times[1])
    low, middle, high = (float(v) for v in np.quantile(ratios, [0.25, 0.5, 0.75]))
    return Latency(
        reference=float(np.median(times[0])),
        candidate=float(np.median(times[1])),
        ratio=middle,
        quartiles=(low, high),
        runs=len(ratios),
    )
