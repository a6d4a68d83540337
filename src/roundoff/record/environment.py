"""The settings of this process that change numbers, as rows a report can show."""

from __future__ import annotations

import platform
from collections import Counter
from typing import Any

import torch
from torch import nn


def environment(model: nn.Module | None = None) -> list[dict[str, str]]:
    """Rows ``{name, value, note}``: versions, device, threads and every flag that changes results.

    Reads settings and changes none; whether subnormals are flushed is measured by multiplying two numbers.
    """
    rows: list[dict[str, str]] = []

    def row(name: str, value: Any, note: str = "") -> None:
        rows.append({"name": name, "value": str(value), "note": note})

    row("torch", torch.__version__)
    row(
        "machine",
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "vector width orders the sums",
    )
    row(
        "threads",
        torch.get_num_threads(),
        "another number splits reductions at other places",
    )
    precision = torch.get_float32_matmul_precision()
    fewer = "" if precision == "highest" else "fp32 products are computed in fewer bits"
    row("float32 matmul precision", precision, fewer)
    row(
        "oneDNN",
        "on" if bool(getattr(torch.backends.mkldnn, "enabled", False)) else "off",
    )
    row(
        "deterministic algorithms",
        "on" if torch.are_deterministic_algorithms_enabled() else "off",
    )
    tiny = torch.tensor(1e-30) * torch.tensor(1e-10)
    row("subnormals", "kept" if bool(tiny) else "flushed to zero")
    row("default dtype", str(torch.get_default_dtype()).removeprefix("torch."))
    if torch.cuda.is_available():
        row("GPU", torch.cuda.get_device_name())
        row(
            "TF32",
            f"matmul {torch.backends.cuda.matmul.allow_tf32}, cuDNN {torch.backends.cudnn.allow_tf32}",
        )
        row(
            "cuDNN benchmark",
            torch.backends.cudnn.benchmark,
            "may choose another algorithm each run",
        )
    if model is not None:
        kinds = Counter(
            f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}"
            for p in model.parameters()
        )
        note = ""
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
            note = "the reference itself is low precision: load the model in fp32 to measure against exact numbers"
        row(
            "parameters",
            ", ".join(f"{n} tensors {kind}" for kind, n in kinds.most_common())
            or "none",
            note,
        )
        row(
            "mode",
            "evaluation",
            "dropout off, running statistics used, whatever mode the workload returned",
        )
    return rows
