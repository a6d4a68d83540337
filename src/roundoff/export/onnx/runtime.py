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

#: Operators whose sums are integers. ``MatMulNBits`` reads weights of 4 bits and adds in fp32 or int8.
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
    """

    counts: dict[str, int]
    nodes: tuple[tuple[str, str], ...]

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
        nodes = tuple((n.name, n.op_type) for n in onnx.load(str(file)).graph.node)
    return Kernels(dict(Counter(operator for _, operator in nodes)), nodes)


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
