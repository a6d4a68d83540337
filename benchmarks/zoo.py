"""How good, how fast and how small are the networks of examples/zoo in int8, beside ONNX Runtime's own quantizer?

Every network is quantized by `roundoff.quantize(workload, output=folder)` as it comes, and by ONNX Runtime's
`quantize_static` (Q/DQ, per channel, u8 values and s8 weights, preprocessed, the better of MinMax and Entropy) from the
file of `torch.onnx.export`, on the same batches; both files run on the same held-out batches. Without VNNI the usual
kernels clip sums of two products of u8 and s8 to 16 bits: all files run with the session option that avoids it, which
serves ONNX Runtime's files best too; what its file would take without the option is a column of its own. Where no file
of its own with a scale a channel runs, one with a scale a tensor counts; where it fails with the option, both run without.
Latencies are of one thread, in turns in one process, on the first held-out batch. Rows are kept: networks may be measured
one at a time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import io
import json
import logging
import math
import re
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, progress, table
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

import roundoff as ro
from roundoff.errors import RoundoffError
from roundoff.export import export_onnx
from roundoff.workload import named_tensors

FOLDER = ROOT / "examples" / "zoo"
METHODS = ("MinMax", "Entropy")
#: Words in the names of ONNX Runtime's operators whose sums are integers.
INTEGER = ("QLinear", "Integer", "QGemm", "QAttention")
#: Least runs of each file, and seconds for all of them.
RUNS, SECONDS = 30, 2.0

Outputs = list[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Quantized:
    """One quantizer's file of a network, or why there is none.

    Attributes:
        file: None where there is none.
        how: what made it, or the reason that nothing did.
        db: SQNR of the worst output.
        crashed: it ended in an exception that is no message of its own.
        precise: it loads with the session option that avoids sums that clip.
    """

    file: Path | None = None
    how: str = ""
    db: float = -math.inf
    crashed: bool = False
    precise: bool = True


@dataclass(frozen=True)
class Side:
    """Figures of one quantizer: those of `Quantized`, kernels with integer sums, bytes over fp32's."""

    how: str
    db: float | None
    crashed: bool
    kernels: int | None
    size: float | None


@dataclass(frozen=True)
class Row:
    """Figures of one network; `times` are medians in seconds, by file."""

    name: str
    ours: Side
    peer: Side
    times: dict[str, float]

    @property
    def difference(self) -> float | None:
        """Our SQNR over the peer's, in dB; None where one has no file."""
        if self.ours.db is None or self.peer.db is None:
            return None
        return 0.0 if self.ours.db == self.peer.db else self.ours.db - self.peer.db

    def ratio(self, slow: str, quick: str) -> float | None:
        """Time of one file over that of another; None where one did not run."""
        if slow not in self.times or quick not in self.times:
            return None
        return self.times[slow] / self.times[quick]

    @classmethod
    def read(cls, text: str) -> Row:
        values = json.loads(text)
        ours, peer = Side(**values.pop("ours")), Side(**values.pop("peer"))
        return cls(ours=ours, peer=peer, **values)


class Flat(nn.Module):
    """A workload's forward pass from the tensors of a batch to those of the output."""

    def __init__(self, workload: ro.Workload, batch: Any) -> None:
        super().__init__()
        self.model = workload.model
        self._run = workload.run
        self._leaves, self._layout = tree_flatten(batch)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        leaves = [
            next(remaining) if isinstance(leaf, Tensor) else leaf
            for leaf in self._leaves
        ]
        output = self._run(tree_unflatten(leaves, self._layout))
        return tuple(named_tensors(output).values())


class Session:
    """An ONNX file in ONNX Runtime on one thread; `precise` avoids sums that clip."""

    def __init__(
        self, file: Path, *, precise: bool = True, optimised: Path | None = None
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        if precise:
            options.add_session_config_entry("session.x64quantprecision", "1")
        if optimised is not None:
            options.optimized_model_filepath = str(optimised)
        self._session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        self._read = {value.name for value in self._session.get_inputs()}

    def __call__(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        read = {name: array for name, array in feed.items() if name in self._read}
        outputs: list[np.ndarray] = self._session.run(None, read)
        return outputs


def feed(batch: Any) -> dict[str, np.ndarray]:
    """The tensors of a batch by the names that `roundoff.export` gives to inputs."""
    leaves, _ = tree_flatten_with_path(batch)
    named = [
        ("_".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path), leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    ]
    if any(not name or name.isdigit() for name, _ in named):
        one = len(named) == 1
        named = [("input" if one else f"input_{name}", leaf) for name, leaf in named]
    return {name: leaf.numpy() for name, leaf in named}


def reference(workload: ro.Workload) -> Outputs:
    """The outputs in fp32, in PyTorch, on the held-out batches."""
    with torch.no_grad():
        outputs = [named_tensors(workload.run(batch)) for batch in workload.held_out]
    return [
        {name: value.numpy().copy() for name, value in output.items()}
        for output in outputs
    ]


def worst_db(
    file: Path, workload: ro.Workload, wanted: Outputs, precise: bool = True
) -> float:
    """SQNR in dB of the worst of the named outputs, over all held-out batches."""
    session = Session(file, precise=precise)
    signal: dict[str, float] = {}
    error: dict[str, float] = {}
    for batch, expected in zip(workload.held_out, wanted, strict=True):
        actual = session(feed(batch))
        for (name, value), measured in zip(expected.items(), actual, strict=True):
            exact = value.astype(np.float64)
            signal[name] = signal.get(name, 0.0) + float(np.square(exact).sum())
            off = float(np.square(measured - exact).sum())
            error[name] = error.get(name, 0.0) + off
    if not all(math.isfinite(e) for e in error.values()):
        return -math.inf
    return min(
        math.inf if error[name] == 0 else 10 * math.log10(signal[name] / error[name])
        for name in signal
    )


def free_axes(workload: ro.Workload) -> tuple[dict[int, Any] | None, ...]:
    """The first axis of each tensor, and those that differ between batches."""
    shapes = [
        [array.shape for array in feed(batch).values()]
        for batch in [*workload.batches, *workload.held_out]
    ]
    free: list[dict[int, Any] | None] = []
    for lengths in zip(*shapes, strict=True):
        axes = [
            axis
            for axis in range(len(lengths[0]))
            if axis == 0 or len({shape[axis] for shape in lengths}) > 1
        ]
        free.append(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) or None)
    return tuple(free)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters and quantizers print and log."""
    level, nowhere = logging.root.manager.disable, io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(level)


def export_fp32(workload: ro.Workload, folder: Path) -> tuple[Path, str]:
    """The file that ONNX Runtime's quantizer starts from, and what wrote it.

    `torch.onnx.export` with free axes, or with fixed ones, or else our own.
    """
    flat = Flat(workload, workload.batches[0]).eval()
    names = list(feed(workload.batches[0]))
    tensors = tuple(
        leaf
        for leaf in tree_flatten(workload.batches[0])[0]
        if isinstance(leaf, Tensor)
    )
    file = folder / "torch.onnx"
    for how, axes in (("torch", free_axes(workload)), ("torch, fixed sizes", None)):
        with contextlib.suppress(torch.onnx.OnnxExporterError), torch.no_grad():
            program: Any = torch.onnx.export(
                flat,
                tensors,
                dynamo=True,
                verbose=False,
                input_names=names,
                dynamic_shapes=None if axes is None else {"tensors": axes},
            )
            program.save(str(file), external_data=False)
            return file, how
    return export_onnx(workload, workload.model, file), "roundoff's fp32 file"


def prepared(file: Path, folder: Path) -> tuple[Path, str]:
    """The file after ONNX Runtime's own preparation, as much of it as runs."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    target = folder / "prepared.onnx"
    for note, options in (
        ("", {}),
        (", no symbolic shapes", {"skip_symbolic_shape": True}),
    ):
        # it asserts, raises bare exceptions, and leaves files where it runs
        with contextlib.suppress(Exception), contextlib.chdir(folder):
            quant_pre_process(str(file), str(target), **options)
            return target, note
    return file, ", not preprocessed"


def peer(workload: ro.Workload, wanted: Outputs, folder: Path) -> Quantized:
    """ONNX Runtime's own file: the better of its ways to choose ranges.

    Weights have a scale a channel, or one where no such file runs.
    """
    try:
        with quiet():
            file, how = export_fp32(workload, folder)
            start, note = prepared(file, folder)
    except Exception as error:  # noqa: BLE001 - any failure of the peer is a row
        return Quantized(how=first_line(error), crashed=True)
    reasons: list[str] = []
    for per_channel in (True, False):
        tries = [
            try_peer(workload, wanted, start, method, per_channel) for method in METHODS
        ]
        files = [made for made in tries if made.file is not None]
        if files:
            best = max(files, key=lambda made: made.db)
            return replace(best, how=f"{best.how}, {how}{note}")
        reasons += [made.how for made in tries]
    return Quantized(how="; ".join(reasons), crashed=True)


def try_peer(
    workload: ro.Workload, wanted: Outputs, start: Path, method: str, per_channel: bool
) -> Quantized:
    """One file of ONNX Runtime's quantizer, or why it does not run."""
    label = method if per_channel else f"{method}, per tensor"
    target = start.with_name(f"{label}.onnx")
    try:
        with quiet():
            quantize_static(start, target, workload, method, per_channel)
        precise = loads(target)
        db = worst_db(target, workload, wanted, precise)
    except Exception as error:  # noqa: BLE001 - any failure of the peer is a row
        return Quantized(how=f"{label}: {first_line(error)}", crashed=True)
    option = "" if precise else ", fails with the option against clipping"
    return Quantized(target, f"{label}{option}", db, precise=precise)


def loads(file: Path) -> bool:
    """Whether a file loads with the session option that avoids sums that clip."""
    try:
        Session(file)
    except Exception:  # noqa: BLE001 - whatever ONNX Runtime raises
        return False
    return True


def quantize_static(
    start: Path, target: Path, workload: ro.Workload, method: str, per_channel: bool
) -> None:
    import onnx
    from onnxruntime import quantization as ort

    read = {value.name for value in onnx.load(str(start)).graph.input}

    class Reader(ort.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._rest = iter(workload.batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self._rest, None)
            if batch is None:
                return None
            return {name: a for name, a in feed(batch).items() if name in read}

    ort.quantize_static(
        str(start),
        str(target),
        Reader(),
        quant_format=ort.QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=ort.QuantType.QUInt8,
        weight_type=ort.QuantType.QInt8,
        calibrate_method=ort.CalibrationMethod[method],
    )


def ours(workload: ro.Workload, wanted: Outputs, folder: Path) -> Quantized:
    """Our file, as `roundoff quantize FILE --formats int8` writes it."""
    output = folder / "ours"
    try:
        ro.quantize(workload, output=output, formats=("int8",), tradeoff=False)
    except RoundoffError as error:
        return Quantized(how=first_line(error))
    except Exception as error:  # noqa: BLE001 - these tracebacks are counted
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return Quantized(how=f"{where}: {first_line(error)}", crashed=True)
    file = output / "model.onnx"
    if not file.exists():
        reason = "no model.onnx was written: summary.json has the reason"
        return Quantized(how=reason)
    try:
        return Quantized(file, "", worst_db(file, workload, wanted))
    except Exception as error:  # noqa: BLE001 - whatever ONNX Runtime raises
        return Quantized(how=f"the file does not run: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """The kind of an error and its first line, without folders."""
    line = (str(error).strip().splitlines() or [""])[0]
    line = re.sub(r"(/[^\s/:]+)+/", "", line)
    return f"{type(error).__name__}: {line}"[:110]


def race(files: dict[str, Session], inputs: dict[str, np.ndarray]) -> dict[str, float]:
    """Median seconds of each, in turns, of the thread that computes."""
    times: dict[str, list[float]] = {label: [] for label in files}
    end = time.perf_counter() + SECONDS
    turns = 0
    while files and (turns < RUNS + 3 or time.perf_counter() < end):
        turns += 1
        for label, session in files.items():
            start = time.thread_time()
            session(inputs)
            times[label].append(time.thread_time() - start)
    return {label: statistics.median(taken[3:]) for label, taken in times.items()}


def integer_kernels(file: Path, precise: bool) -> int:
    """Operators with integer sums in the graph that ONNX Runtime runs."""
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        optimised = Path(folder) / "optimised.onnx"
        Session(file, precise=precise, optimised=optimised)
        operators = [node.op_type for node in onnx.load(str(optimised)).graph.node]
    return sum(any(word in operator for word in INTEGER) for operator in operators)


def side(quantized: Quantized, whole: Path) -> Side:
    """The figures of a file that is still there."""
    file = quantized.file
    if file is None:
        return Side(quantized.how, None, quantized.crashed, None, None)
    size = file.stat().st_size / whole.stat().st_size if whole.exists() else None
    kernels = integer_kernels(file, quantized.precise)
    return Side(quantized.how, quantized.db, False, kernels, size)


def measure(name: str, folder: Path) -> Row:
    """Both quantizers on one network."""
    workload = ro.Workload.load(FOLDER / f"{name}.py")
    workload.model.eval()
    wanted = reference(workload)
    own = ours(workload, wanted, folder)
    other = peer(workload, wanted, folder)
    sessions: dict[str, Session] = {}
    whole = folder / "torch.onnx"
    if whole.exists():
        sessions["fp32"] = Session(whole)
    if own.file is not None:
        # where the peer's file fails with the option, both run without
        precise = other.file is None or other.precise
        sessions["ours"] = Session(own.file, precise=precise)
    if other.file is not None:
        sessions["peer"] = Session(other.file, precise=other.precise)
        sessions["peer, clipping"] = Session(other.file, precise=False)
    times = race(sessions, feed(workload.held_out[0]))
    return Row(name, side(own, whole), side(other, whole), times)


def cells(row: Row) -> tuple[object, ...]:
    sides = (row.ours, row.peer)
    return (
        row.name,
        shown(row.ours.db, ".1f"),
        shown(row.peer.db, ".1f"),
        shown(row.difference, "+.1f"),
        shown(row.ratio("fp32", "ours")),
        shown(row.ratio("fp32", "peer")),
        shown(row.ratio("peer", "ours")),
        shown(row.ratio("peer, clipping", "ours")),
        " / ".join("–" if s.kernels is None else str(s.kernels) for s in sides),
        " / ".join(shown(s.size) or "–" for s in sides),
    )


def shown(value: float | None, style: str = ".2f") -> str | None:
    return None if value is None else format(value, style)


def middle(values: list[float | None]) -> float:
    """Median of those that are there; NaN of none."""
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else math.nan


def bars(rows: list[Row]) -> list[tuple[object, ...]]:
    """Figure, measured, bar and verdict of all rows."""
    measured = [*accuracy(rows), *speed(rows)]
    return [(*line, "met" if met else "**missed**") for *line, met in measured]


def accuracy(rows: list[Row]) -> Iterator[tuple[str, str, str, bool]]:
    """A network without our file misses; one without the peer's meets."""
    count = len(rows)
    files = [row for row in rows if row.ours.db is not None]
    yield "files", f"{len(files)} of {count}", "all", len(files) == count
    crashes = sum(row.ours.crashed for row in rows)
    yield "tracebacks", str(crashes), "0", crashes == 0
    better = sum(row.difference is None or row.difference > 0 for row in files)
    yield "SQNR above ORT's", f"{better} of {count}", "all", better == count
    gain = middle([row.difference for row in rows])
    yield "median difference, dB", f"{gain:.1f}", "≥ 3", gain >= 3


def speed(rows: list[Row]) -> Iterator[tuple[str, str, str, bool]]:
    ratios = [row.ratio("peer", "ours") for row in rows]
    raced = [ratio for ratio in ratios if ratio is not None]
    fast = sum(ratio >= 0.98 for ratio in raced)
    share = f"{fast} of {len(raced)}"
    yield "latency, ORT's / ours ≥ 0.98", share, "all", fast == len(raced)
    typical = middle(ratios)
    yield "its median", f"{typical:.2f}", "≥ 1.1", typical >= 1.1


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAME", nargs="+", help="measure these alone")
    parser.add_argument(
        "--quick", action="store_true", help="three networks: does it run?"
    )
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FOLDER",
        default=ROOT / "out" / "zoo",
        help="where the figures of each network are kept; all of them are printed",
    )
    args = parser.parse_args()
    names = sorted(file.stem for file in FOLDER.glob("*.py"))
    args.names = args.only or (names[:3] if args.quick else names)
    torch.set_num_threads(1)
    return args


def main() -> None:
    args = options()
    args.rows.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        progress(name)
        with tempfile.TemporaryDirectory() as folder:
            row = measure(name, Path(folder))
        text = json.dumps(asdict(row), indent=1)
        (args.rows / f"{name}.json").write_text(text, encoding="utf-8")
    files = sorted(args.rows.glob("*.json"))
    rows = [Row.read(file.read_text(encoding="utf-8")) for file in files]
    table(
        "The zoo in int8: roundoff beside ONNX Runtime's quantize_static, on held-out batches",
        (
            "network",
            "SQNR dB",
            "ORT's",
            "difference",
            "speed over fp32",
            "ORT's",
            "latency, ORT's / ours",
            "ORT's that clips / ours",
            "integer kernels, ours / ORT's",
            "bytes over fp32, ours / ORT's",
        ),
        map(cells, rows),
    )
    table(
        "What made the files, or why there is none",
        ("network", "ours", "ONNX Runtime's"),
        [(row.name, row.ours.how, row.peer.how) for row in rows],
    )
    table("Bars", ("figure", "measured", "bar", ""), bars(rows))


if __name__ == "__main__":
    main()
