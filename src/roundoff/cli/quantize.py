"""``roundoff quantize``: a parser in front of ``roundoff.quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import options as o


def command(
    workload: Annotated[
        Path, typer.Argument(help="A Python file with model() and batches().")
    ],
    formats: Annotated[
        str,
        typer.Option(
            "--formats",
            "-f",
            help="Formats that may be used, separated by commas; several need a target.",
        ),
    ] = "int8",
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            help="0.5%: most the metric may lose; 38dB: least SQNR of every output; "
            "cls=40dB,price=30dB: of each.",
        ),
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(
            "--of",
            help="Judge by a part of the output, by name. Default: every output but numbers "
            "beside larger tensors.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="A plan to follow, in place of formats and target."
        ),
    ] = None,
    weights_only: Annotated[
        str | None,
        typer.Option(
            "--weights-only",
            help="Quantize weights alone, to int4, int8 or another width.",
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            "--group",
            min=1,
            help="How many weights share a scale, with --weights-only.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "--weights",
            help="Weights: gptq, nearest, awq, awq+gptq, smoothquant, dmq, ...",
        ),
    ] = "gptq",
    observer: Annotated[
        str,
        typer.Option(
            "--observer",
            help="Ranges of values: adjoint, minmax, mse, percentile, entropy, ifmr, hfmg ...",
        ),
    ] = "adjoint",
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="Values without zero point.")
    ] = False,
    dynamic: Annotated[
        bool,
        typer.Option(
            "--dynamic", help="Scales of values are chosen while the model runs."
        ),
    ] = False,
    granularity: Annotated[
        str,
        typer.Option(
            "--granularity",
            help="Values that share a scale: tensor, channel, token, group:SIZE.",
        ),
    ] = "tensor",
    weight_granularity: Annotated[
        str,
        typer.Option(
            "--weight-granularity",
            help="The same for weights; format: as each format has it.",
        ),
    ] = "format",
    kv_cache: Annotated[
        str,
        typer.Option(
            "--kv-cache",
            help="Format of attention's keys and values: int8, int4:channel, fp8_e4m3fn ...",
        ),
    ] = "",
    divide: Annotated[
        bool,
        typer.Option(
            "--divide",
            help="Divide channels in front of linear layers by what the output loses.",
        ),
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="PATTERN: these sites stay in fp32. Repeatable."),
    ] = None,
    pin: o.Pin = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="An AMCT configuration, .cfg or .json."),
    ] = None,
    cost: o.Cost = "bitops",
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=1,
            help="Calibration samples, from the first batches on; 512 if left out.",
        ),
    ] = None,
    prune: Annotated[
        str,
        typer.Option(
            "--prune", help="First remove weights: 2:4, channel:0.3 or magnitude:0.5."
        ),
    ] = "",
    qat: Annotated[
        bool,
        typer.Option("--qat", help="Train with quantization afterwards; needs loss()."),
    ] = False,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            min=1,
            help="Epochs of --qat and after --prune; 2 for --qat if left out.",
        ),
    ] = None,
    lr: Annotated[
        float, typer.Option("--lr", help="Learning rate of the training (AdamW).")
    ] = 1e-4,
    distill: Annotated[
        bool,
        typer.Option("--distill", help="Train towards the fp32 model's output too."),
    ] = False,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto/--no-pareto", help="Also measure each usual format alone."
        ),
    ] = True,
    onnx: Annotated[
        bool,
        typer.Option(
            "--onnx/--no-onnx", help="Export, and prove the file in ONNX Runtime."
        ),
    ] = True,
    checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint", help="Also write the weights for compressed-tensors."
        ),
    ] = False,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for all files; must be new or empty."
        ),
    ] = Path("out/quantized"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")
    ] = False,
    top: o.Top = 10,
    json: o.Json = False,
) -> int:
    """Quantize a model: choose formats for a target, calibrate, repair, export, and
    prove it in ONNX Runtime.

    Writes model.onnx (Q/DQ), fake_quant.onnx, fp32.onnx, model.pt, plan.toml,
    record.toml, record.txt (AMCT's format), report.html and summary.json; with
    --checkpoint a folder for compressed-tensors too. The exit code is 1 when the model
    or model.onnx misses the target, or none can meet it.
    """
    import roundoff
    from roundoff.export import asked_formats, rounding
    from roundoff.quantize import Options
    from roundoff.report import print_files, print_quantize

    chosen_formats = asked_formats(o.split(formats), weights_only, group)
    options = Options(
        symmetric=symmetric,
        dynamic=dynamic,
        activation=granularity,
        weight=weight_granularity,
        kv_cache=kv_cache,
        divide=divide,
    )
    with o.progress(json) as progress:
        delivery = roundoff.quantize(
            workload,
            plan,
            output=output,
            formats=chosen_formats,
            target=target,
            of=of,
            skip=skip or (),
            pin=o.pairs(pin, "pin"),
            cost=cost,
            options=options,
            rounding=rounding(observer, method),
            config=config,
            samples=samples,
            prune=prune,
            qat=qat,
            epochs=epochs or (2 if qat else 0),
            lr=lr,
            distill=distill,
            tradeoff=pareto,
            onnx=onnx,
            checkpoint=checkpoint,
            overwrite=overwrite,
            progress=progress,
        )
    if json:
        o.print_json(delivery.summary)
    else:
        console = o.console(False)
        print_quantize(delivery.summary, console, top=top)
        print_files(delivery.summary, str(output), console)
    return 0 if delivery.met else 1
