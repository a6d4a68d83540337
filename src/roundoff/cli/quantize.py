"""``roundoff quantize``: a parser in front of ``roundoff.quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o

DEFAULT_FORMATS = kinds.Names(("int8",))


def command(
    workload: Annotated[
        Path, typer.Argument(help="A Python file with model() and batches().")
    ],
    formats: Annotated[
        kinds.Names,
        kinds.option(
            "--formats",
            "-f",
            parse=kinds.formats,
            help="Formats that may be used, separated by commas; several need a target.",
            metavar="FORMATS",
        ),
    ] = DEFAULT_FORMATS,
    target: o.Target = None,
    metric_drop: o.MetricDrop = None,
    of: Annotated[
        str | None,
        kinds.option(
            "--of",
            parse=kinds.pattern,
            help="Judge by a part of the output, by name. Default: every output but numbers "
            "beside larger tensors.",
            metavar="NAME",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        kinds.option(
            "--plan",
            parse=kinds.input_file,
            help="A plan to follow, in place of formats and target.",
            metavar="FILE",
        ),
    ] = None,
    weights_only: Annotated[
        str | None,
        kinds.option(
            "--weights-only",
            parse=kinds.weight_format,
            help="Quantize weights alone, to int4, int8 or another width.",
            metavar="FORMAT",
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
        kinds.option(
            "--method",
            parse=kinds.method,
            help="Weights: gptq, nearest, awq, awq+gptq, smoothquant, dmq, ...",
            metavar="METHOD",
        ),
    ] = "gptq",
    observer: Annotated[
        str,
        kinds.option(
            "--observer",
            parse=kinds.observer,
            help="Ranges of values: adjoint, minmax, mse, percentile, entropy, ifmr, hfmg ...",
            metavar="OBSERVER",
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
        kinds.option(
            "--granularity",
            parse=kinds.granularity,
            help="Values that share a scale: tensor, channel, token, group:SIZE.",
            metavar="SHARED",
        ),
    ] = "tensor",
    weight_granularity: Annotated[
        str,
        kinds.option(
            "--weight-granularity",
            parse=kinds.weight_granularity,
            help="The same for weights; format: as each format has it.",
            metavar="SHARED",
        ),
    ] = "format",
    kv_cache: Annotated[
        str,
        kinds.option(
            "--kv-cache",
            parse=kinds.cache_format,
            help="Format of attention's keys and values: int8, int4:channel, fp8_e4m3fn ...",
            metavar="FORMAT",
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
        kinds.option(
            "--skip",
            parse=kinds.pattern,
            help="PATTERN: these sites stay in fp32. Repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    pin: o.Pins = None,
    config: Annotated[
        Path | None,
        kinds.option(
            "--config",
            parse=kinds.input_file,
            help="An AMCT configuration, .cfg or .json.",
            metavar="FILE",
        ),
    ] = None,
    cost: Annotated[
        str,
        kinds.option(
            "--cost",
            parse=kinds.cost_of_codes,
            help="What to save: bitops, bytes moved, storage, or operators in fp32.",
            metavar="COST",
        ),
    ] = "bitops",
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
        kinds.option(
            "--prune",
            parse=kinds.pruning,
            help="First remove weights: 2:4, channel:0.3 or magnitude:0.5.",
            metavar="WEIGHTS",
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
        float,
        kinds.option(
            "--lr",
            parse=kinds.above_zero,
            help="Learning rate of the training (AdamW).",
            metavar="NUMBER",
        ),
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
    rows: o.Rows = 10,
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

    chosen_formats = asked_formats(formats, weights_only, group)
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
            metric_drop=metric_drop,
            of=of,
            skip=skip or (),
            pin=o.pins(pin),
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
        console = o.console()
        print_quantize(delivery.summary, console, top=rows)
        print_files(delivery.summary, str(output), console)
    return 0 if delivery.met else 1
