"""The settings of this process that change numbers."""

from __future__ import annotations

import platform
from collections import Counter
from typing import Any

import torch
from torch import nn

from roundoff.record.setting import Setting


def environment(model: nn.Module | None = None) -> tuple[Setting, ...]:
    """Read versions, device, threads and every flag that changes results.

    Reads settings and changes none; whether subnormals are flushed is measured by
    multiplying two numbers.
    """
    settings = [*_cpu_settings(), *_gpu_settings()]
    if model is not None:
        settings += _model_settings(model)
    return tuple(settings)


def _setting(name: str, value: Any, note: str = "") -> Setting:
    return Setting(name, str(value), note)


def _cpu_settings() -> list[Setting]:
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    precision = torch.get_float32_matmul_precision()
    fewer = "" if precision == "highest" else "fp32 products are computed in fewer bits"
    onednn = bool(getattr(torch.backends.mkldnn, "enabled", False))
    deterministic = torch.are_deterministic_algorithms_enabled()
    keeps_subnormals = bool(torch.tensor(1e-30) * torch.tensor(1e-10))
    threads_note = "another number splits reductions at other places"
    return [
        _setting("torch", torch.__version__),
        _setting("machine", machine, "vector width orders the sums"),
        _setting("threads", torch.get_num_threads(), threads_note),
        _setting("float32 matmul precision", precision, fewer),
        _setting("oneDNN", _on_or_off(onednn)),
        _setting("deterministic algorithms", _on_or_off(deterministic)),
        _setting("subnormals", "kept" if keeps_subnormals else "flushed to zero"),
        _setting(
            "default dtype", str(torch.get_default_dtype()).removeprefix("torch.")
        ),
    ]


def _gpu_settings() -> list[Setting]:
    if not torch.cuda.is_available():
        return []
    matmul = torch.backends.cuda.matmul.allow_tf32
    cudnn = torch.backends.cudnn.allow_tf32
    benchmark_note = "may choose another algorithm each run"
    return [
        _setting("GPU", torch.cuda.get_device_name()),
        _setting("TF32", f"matmul {matmul}, cuDNN {cudnn}"),
        _setting("cuDNN benchmark", torch.backends.cudnn.benchmark, benchmark_note),
    ]


def _model_settings(model: nn.Module) -> list[Setting]:
    kinds: Counter[str] = Counter()
    is_low_precision = False
    for parameter in model.parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        kinds[f"{dtype} on {parameter.device.type}"] += 1
        is_low_precision |= parameter.dtype in (torch.float16, torch.bfloat16)
    counts = [f"{count} tensors {kind}" for kind, count in kinds.most_common()]
    reference_note = (
        "the reference itself is low precision: load the model in fp32 to measure "
        "against exact numbers"
    )
    mode_note = (
        "dropout off, running statistics used, whatever mode the workload returned"
    )
    return [
        _setting(
            "parameters",
            ", ".join(counts) or "none",
            reference_note if is_low_precision else "",
        ),
        _setting("mode", "evaluation", mode_note),
    ]


def _on_or_off(enabled: bool) -> str:
    return "on" if enabled else "off"
