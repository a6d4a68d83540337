"""One network quantized by another tool, in the Python that has it: what quantize_nets.py starts for each of its rows.

    python quantize_peers.py PEER NAME OUT [--nets FOLDER] [--quick]

Writes OUT/PEER.onnx, or OUT/PEER.npy with the logits of the test images where the tool's result has no ONNX file, and prints
one line of JSON: CPU seconds of the tool's own work, and what it left as a note. Exports and imports are not counted.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fashion_nets import Data, load
from torch import nn

IMAGE = "x"


class Job:
    """The network as module and as ONNX file, calibration data, and where the result goes."""

    def __init__(
        self, peer: str, name: str, out: Path, nets: Path | None, quick: bool
    ) -> None:
        self.peer, self.out = peer, out
        self.net = load(name, nets, quick)
        self.data = Data.load(quick)
        self.file = out / f"{peer}.onnx"

    def onnx(self, opset: int = 17) -> Path:
        """The fp32 network, by the exporter that these tools are used with (of TorchScript; BatchNorm folded)."""
        path = self.out / f"fp32_{opset}.onnx"
        torch.onnx.export(
            self.net,
            (self.data.calibration[0],),
            str(path),
            dynamo=False,
            opset_version=opset,
            input_names=[IMAGE],
            output_names=["logits"],
            dynamic_axes={IMAGE: {0: "n"}, "logits": {0: "n"}},
        )
        return path

    def feeds(self) -> list[dict[str, np.ndarray]]:
        return [{IMAGE: batch.numpy()} for batch in self.data.calibration]

    def run(self, model: nn.Module) -> None:
        """Calibration batches through a module."""
        with torch.no_grad():
            for batch in self.data.calibration:
                model(batch)

    def keep(self, model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Logits instead of a file."""
        with torch.no_grad():
            found = torch.cat([model(x) for x in self.data.images.split(32)])
        np.save(self.out / f"{self.peer}.npy", found.numpy())


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    made = work()
    return made, time.process_time() - start


def ort(job: Job, method: str, per_channel: bool) -> float:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rest = iter(job.feeds())

        def get_next(self) -> Any:
            return next(self.rest, None)

    prepared = job.out / "prepared.onnx"
    quant_pre_process(job.onnx(), prepared)
    _, seconds = timed(
        lambda: quantize_static(
            prepared,
            job.file,
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=per_channel,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod[method],
        )
    )
    return seconds


def nncf(job: Job, bias: str) -> float:
    import nncf as tool
    import onnx

    tool.set_log_level(logging.ERROR)
    model = onnx.load(job.onnx())
    advanced = tool.AdvancedQuantizationParameters(
        disable_bias_correction=bias == "none"
    )
    made, seconds = timed(
        lambda: tool.quantize(
            model,
            tool.Dataset(job.feeds()),
            preset=tool.QuantizationPreset.MIXED,
            subset_size=16,
            fast_bias_correction=bias != "full",
            advanced_parameters=advanced,
        )
    )
    onnx.save(made, job.file)
    return seconds


def torchao(job: Job) -> float:
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    example = (job.data.calibration[0],)

    def work() -> Any:
        batch = torch.export.Dim("batch", min=2, max=4096)
        program = torch.export.export(
            job.net, example, dynamic_shapes=({0: batch},)
        ).module()
        prepared = prepare_pt2e(
            program,
            x86.X86InductorQuantizer().set_global(
                x86.get_default_x86_inductor_quantization_config()
            ),
        )
        job.run(prepared)
        return convert_pt2e(prepared)

    made, seconds = timed(work)
    job.keep(made)
    export(job, made, example)
    return seconds


def export(job: Job, made: Any, example: tuple[torch.Tensor, ...]) -> None:
    """The torch exporter's Q/DQ; the logits stand where it cannot."""
    try:
        torch.onnx.export(
            made,
            example,
            str(job.file),
            dynamo=True,
            verbose=False,
            opset_version=21,
            external_data=False,
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
        )
    except Exception as error:  # noqa: BLE001 - another tool's error, whatever it is
        print(f"no ONNX: {str(error).splitlines()[0]}", file=sys.stderr)


def inc(job: Job) -> float:
    from neural_compressor.torch.export import export as to_graph
    from neural_compressor.torch.quantization import (
        convert,
        get_default_static_config,
        prepare,
    )

    example = (job.data.calibration[0],)

    def work() -> Any:
        batch = torch.export.Dim("batch", min=2, max=4096)
        graph = to_graph(job.net, example_inputs=example, dynamic_shapes=({0: batch},))
        prepared = prepare(graph, quant_config=get_default_static_config())
        job.run(prepared)
        return convert(prepared)

    made, seconds = timed(work)
    job.keep(made)
    export(job, made, example)
    return seconds


def aimet(job: Job, scheme: str, equalise: bool = False) -> float:
    import onnx
    from aimet_onnx.cross_layer_equalization import equalize_model
    from aimet_onnx.quantsim import QuantizationSimModel

    model = onnx.load(job.onnx())

    def work() -> Any:
        if equalise:
            equalize_model(model)
        sim = QuantizationSimModel(
            model,
            quant_scheme=scheme,
            param_type="int8",
            activation_type="int8",
            providers=["CPUExecutionProvider"],
        )
        sim.compute_encodings(job.feeds())
        return sim

    sim, seconds = timed(work)
    job.keep(lambda x: torch.from_numpy(sim.session.run(None, {IMAGE: x.numpy()})[0]))
    onnx.save(sim.to_onnx_qdq(), job.file)
    return seconds


PEERS: dict[str, Callable[[Job], float]] = {
    "ort-minmax-channel": lambda job: ort(job, "MinMax", True),
    "ort-minmax-tensor": lambda job: ort(job, "MinMax", False),
    "ort-percentile-channel": lambda job: ort(job, "Percentile", True),
    "nncf": lambda job: nncf(job, "none"),
    "nncf-fast-bias": lambda job: nncf(job, "fast"),
    "nncf-full-bias": lambda job: nncf(job, "full"),
    "torchao-pt2e": torchao,
    "neural-compressor": inc,
    "aimet": lambda job: aimet(job, "min_max"),
    "aimet-cle": lambda job: aimet(job, "tf_enhanced", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--nets", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if hasattr(
        os, "sched_setaffinity"
    ):  # one core: a tool whose sessions take a thread for each core waits in none
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    args.out.mkdir(parents=True, exist_ok=True)
    job = Job(args.peer, args.name, args.out, args.nets, args.quick)
    print(json.dumps({"seconds": PEERS[args.peer](job)}))


if __name__ == "__main__":
    main()
