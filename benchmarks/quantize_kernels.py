"""Does anything between two integer kernels go through floats, and how fast are the files beside ONNX Runtime's own?

Untrained networks of many kinds (``kernel_nets``), in int8: ours as ``export_onnx`` writes it, and what ONNX Runtime's
``quantize_static`` (Q/DQ, per channel, MinMax) makes of our fp32 file. All files take turns on one thread, in batches
of one and eight. ``between`` counts the operators that compute in floats from codes and become codes again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import progress, table
from kernel_nets import NETS, made
from quantize_nets import MINMAX, Runtime, speeds
from torch import Tensor

import roundoff as ro
from roundoff.errors import QuantizationError
from roundoff.export import Deployed, export_onnx, kernels

#: Ours over ONNX Runtime's: each network, and the median.
LEAST, MEDIAN = 0.98, 1.1


def peer(source: Path, file: Path, batches: list[Tensor]) -> str:
    """Quantize a file with ONNX Runtime's quantizer; return why it cannot, or nothing."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    name = Runtime(source).name

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rest = iter([{name: batch.numpy()} for batch in batches])

        def get_next(self) -> Any:
            return next(self.rest, None)

    prepared = file.with_suffix(".prepared.onnx")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            quant_pre_process(source, prepared, skip_symbolic_shape=True)
            quantize_static(
                prepared,
                file,
                Reader(),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
        kernels(file)
    except (ValueError, QuantizationError) as error:
        return str(error).strip().splitlines()[-1][:80]
    return ""


def signal(file: Path, reference: Path, batches: list[Tensor]) -> float:
    """SQNR of a file's outputs against another's, in dB."""
    power, noise = 0.0, 0.0
    sessions = [Runtime(path).session for path in (file, reference)]
    name = sessions[1].get_inputs()[0].name
    for batch in batches:
        feed = {name: batch.numpy()}
        pairs = zip(*(opened.run(None, feed) for opened in sessions), strict=True)
        for found, exact in pairs:
            power += float(np.square(exact, dtype=np.float64).sum())
            noise += float(np.square(np.float64(found) - exact).sum())
    return 10 * float(np.log10(power / max(noise, 1e-300)))


def row(name: str, folder: Path, args: argparse.Namespace) -> tuple[list[str], float]:
    """Measure one network; return its row, and our speed over ONNX Runtime's."""
    net, batches, held = made(name)
    if args.quick:
        batches = batches[:1]
        held = held[:1]
    workload = ro.Workload(net, batches)
    reference, ours, theirs = (folder / f"{name}.{k}.onnx" for k in ("a", "b", "c"))
    export_onnx(workload, net, reference)
    rounding = MINMAX if args.minmax else None
    quantized = ro.quantize(workload, "int8", rounding=rounding, spread=not args.minmax)
    export_onnx(workload, Deployed(quantized), ours)
    files = {"ours": ours}
    reason = peer(reference, theirs, batches)
    if not reason:
        files["theirs"] = theirs
    cells = [name, f"{signal(ours, reference, held):.1f}"]
    cells.append(reason or f"{signal(theirs, reference, held):.1f}")
    cells.append(str(len(kernels(ours).between_codes)))
    cells.append("" if reason else str(len(kernels(theirs).between_codes)))
    ratios = []
    for size in (1, 8):
        x = held[0][:size].numpy()
        taken = {k: v[0] for k, v in speeds(reference, files, x, args.rounds).items()}
        cells.append(f"{taken['ours']:.2f}")
        if "theirs" in taken:
            ratios.append(taken["ours"] / taken["theirs"])
        cells.append(f"{ratios[-1]:.2f}" if ratios else "")
    return cells, ratios[0] if ratios else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(NETS), nargs="+", default=list(NETS))
    parser.add_argument("--rounds", type=int, default=60, help="runs of each file")
    parser.add_argument("--minmax", action="store_true", help="plain rounding: quick")
    parser.add_argument(
        "--quick", action="store_true", help="one network, three runs: does it run?"
    )
    args = parser.parse_args()
    if args.quick:
        args.only, args.rounds = args.only[:1], 3
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            progress(name)
            cells, ratio = row(name, Path(folder), args)
            rows.append(cells)
            ratios.append(ratio)
    heads = "network,dB,ORT dB,between,ORT between,over fp32,over ORT,over fp32 (8),over ORT (8)"
    table("int8, one thread", heads.split(","), rows)
    measured = [ratio for ratio in ratios if ratio == ratio]
    print(
        f"\nover ONNX Runtime's own, batches of one: least {min(measured):.2f} (bar {LEAST}), "
        f"median {statistics.median(measured):.2f} (bar {MEDIAN})"
    )


if __name__ == "__main__":
    main()
