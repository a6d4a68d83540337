"""folder: write what ``roundoff quantize`` promises, whole or not at all; what cannot be written has its reason in a row."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roundoff.errors import OutputError, RoundoffError, WorkloadError
from roundoff.export import (
    Ask,
    Made,
    Progress,
    add_proof,
    make,
    save_model,
    summarize,
    tradeoff,
)
from roundoff.report import write_json, write_quantize
from roundoff.workload import Workload

#: File -> what it is.
FILES = {
    "model.onnx": "integer codes and Q/DQ: what is deployed",
    "fake_quant.onnx": "the same arithmetic in floating point",
    "fp32.onnx": "the unquantized model, to compare with",
    "model.pt": "the simulation in PyTorch: roundoff.export.delivery.load.load_model",
    "plan.toml": "which site runs in which format",
    "record.toml": "every scale and zero point",
    "record.txt": "the same in AMCT's format",
    "report.html": "this report as a page",
    "summary.json": "this report as data",
}


def deliver(
    workload: Workload,
    ask: Ask,
    folder: str | Path,
    *,
    onnx: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[Made, dict[str, Any]]:
    """Make what is asked and write it all into a folder, which appears when everything is done.

    Args:
        workload: the user's; it is left as it was.
        ask: what to make.
        folder: new or empty; with ``overwrite`` one that holds nothing but the files of ``FILES`` is replaced.
        onnx: export and run the artefact.
        overwrite: see ``folder``.
        progress: called as ``progress(stage, done, total)``.

    Returns:
        What was made, and the summary (as in ``summary.json``).

    Raises:
        OutputError: the folder is in use or cannot be written. Nothing was run.
        QuantizationError and others of ``make``. Nothing was written.
    """
    folder = Path(folder)
    check_free(folder, overwrite)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}."
    ) as temporary:
        # a folder within it, so that the mode is the usual one
        work = Path(temporary) / "files"
        work.mkdir()
        made = make(workload, ask, progress)
        summary = write(made, ask, work, onnx=onnx, progress=progress)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(work, folder)
    return made, summary


def write(
    made: Made, ask: Ask, folder: Path, *, onnx: bool, progress: Progress | None = None
) -> dict[str, Any]:
    """Write all files into a folder that is there; returns the summary."""
    reasons: dict[str, str] = {}
    summary = summarize(made, ask)
    if ask.tradeoff:
        start = time.perf_counter()
        summary["tradeoff"] = tradeoff(made, ask, progress)
        summary["seconds"]["other formats"] = time.perf_counter() - start
    _try(reasons, "model.pt", lambda: save_model(made.model, folder / "model.pt"))
    made.plan.save(folder / "plan.toml")
    record = made.model.record()
    record.save(folder / "record.toml")
    _try(
        reasons,
        "record.txt",
        lambda: summary["lost"].extend(_amct(record, folder / "record.txt")),
    )
    if onnx:
        start = time.perf_counter()
        _artefact(made, folder, summary, reasons, progress)
        summary["seconds"]["export and proof"] = time.perf_counter() - start
    else:
        reasons |= dict.fromkeys(
            ("model.onnx", "fake_quant.onnx", "fp32.onnx"), "--no-onnx"
        )
    summary["files"] = [
        {
            "name": name,
            "what": what,
            "bytes": (folder / name).stat().st_size
            if (folder / name).exists()
            else None,
            "reason": reasons.get(name, ""),
        }
        for name, what in FILES.items()
    ]
    write_quantize(summary, folder / "report.html")
    write_json(summary, folder / "summary.json")
    return summary


def _amct(record: Any, path: Path) -> list[str]:
    from roundoff.export import write_record

    return write_record(record, path)


def _artefact(
    made: Made,
    folder: Path,
    summary: dict[str, Any],
    reasons: dict[str, str],
    progress: Progress | None,
) -> None:
    from roundoff.export import export_fake_quant, prove
    from roundoff.quantize import unrounded

    def proved() -> None:
        exact = unrounded(made.model, made.start)
        found = prove(
            made.workload,
            made.model,
            folder / "model.onnx",
            folder / "fp32.onnx",
            exact=exact,
            pack=True,
        )
        add_proof(summary, found)

    def step(done: int) -> None:
        if progress is not None:
            progress("export and proof", done, 2)

    step(0)
    _try(reasons, "model.onnx", proved)
    step(1)
    if "model.onnx" in reasons:
        for name in ("model.onnx", "fp32.onnx"):
            (folder / name).unlink(missing_ok=True)  # not proved, so not handed out
        reasons["fp32.onnx"] = "only beside model.onnx"
    own, model = made.workload, made.model
    _try(
        reasons,
        "fake_quant.onnx",
        lambda: export_fake_quant(own, model, folder / "fake_quant.onnx"),
    )
    step(2)


def _try(reasons: dict[str, str], name: str, run: Callable[[], Any]) -> None:
    try:
        run()
    except WorkloadError as error:
        reasons[name] = f"{error.what}: {error.got}"  # what the model's code raised
    except RoundoffError as error:
        reasons[name] = error.what
    except ModuleNotFoundError as error:
        reasons[name] = f"{error}: pip install 'roundoff[onnx]'"


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise ``OutputError`` unless the folder may be written."""
    where = str(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        there = (
            sorted(p.name for p in folder.iterdir())
            if folder.is_dir()
            else []
            if not folder.exists()
            else None
        )
        with tempfile.TemporaryFile(dir=folder.parent):
            pass
    except OSError as error:
        raise OutputError(
            "cannot write here",
            where=where,
            got=f"{type(error).__name__}: {error}",
            do="choose another folder with -o",
        ) from error
    if there is None:
        raise OutputError(
            "a file is where the folder should go",
            where=where,
            do="choose another place with -o",
        )
    strangers = [name for name in there if name not in FILES]
    if there and not overwrite:
        raise OutputError(
            "the folder is not empty",
            where=where,
            got=", ".join(there[:5]),
            expected="a new or empty folder",
            do="choose another with -o, or say that it may be replaced: --overwrite",
        )
    if strangers:
        raise OutputError(
            "roundoff quantize has not written this, so the folder is not replaced",
            where=where,
            got=", ".join(strangers[:5]),
            do="choose another folder with -o",
        )
