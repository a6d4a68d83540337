"""Advice on the batches: small files, work that is done again in each epoch, workers,
pinned memory and decoders; each tried where this machine can."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from roundoff.advise.advice import PAYS, TRIAL_ERRORS, AdviceRow, first_line
from roundoff.advise.loading import LOADED, Loading, batches_anew
from roundoff.advise.trial import Precision, Speed, measure_speed
from roundoff.workload import Workload

#: Files are small below this mean size, and many from this number on: a file costs a
#: seek and a look-up however small it is.
SMALL = 256 * 1024
MANY = 16
#: Files of the sample that is packed.
SAMPLE = 200
#: From this share of a step on, waiting for batches is worth a word.
WAIT_SHARE = 0.05
#: Packages that read many samples from few files.
PACKERS = "WebDataset (tar), LitData or LMDB; or one tensor for all samples"
#: Packages that decode images.
DECODERS = ("torchvision", "PIL", "cv2", "turbojpeg", "simplejpeg")
_CPU = torch.device("cpu")
_EQUAL = Precision(output_db=float("inf"), loss_db=None)


def advise_on_loading(
    workload: Workload,
    loading: Loading,
    *,
    seconds: float,
    cores: int,
) -> list[AdviceRow]:
    """Return the rows of the data."""
    rows = [
        *_small_files(loading, seconds),
        *_ready_batches(workload, loading, seconds),
        *_decoder(loading),
    ]
    if loading.loader is not None:
        rows += _workers(loading.loader, loading, seconds, cores)
        rows += _pinned(loading.loader)
    return rows


def _row(name: str, seen: str, do: str, why: str, source: str) -> AdviceRow:
    return AdviceRow(
        name=name,
        seen=seen,
        place="batches()",
        do=do,
        why=why,
        source=source,
        verdict="not tried",
        of="loading",
    )


def _judged(row: AdviceRow, speed: Speed) -> AdviceRow:
    pays = speed.median >= PAYS and speed.low > 1
    verdict = "by hand" if pays else "does not pay"
    return replace(row, speed=speed, precision=_EQUAL, verdict=verdict)


def _measured(
    row: AdviceRow,
    unchanged: Callable[[], object],
    changed: Callable[[], object],
    seconds: float,
) -> AdviceRow:
    try:
        speed = measure_speed(
            unchanged, changed, seconds=seconds, device=_CPU, wall=True
        )
    except TRIAL_ERRORS as error:
        return replace(row, reason=f"it failed: {first_line(error)}")
    return _judged(row, speed)


def _small_files(loading: Loading, seconds: float) -> list[AdviceRow]:
    files = loading.files
    if len(files) < MANY:
        return []
    mean = sum(size for _, size in files) / len(files)
    if mean > SMALL:
        return []
    row = _row(
        "packed_files",
        f"{len(files)} files of {mean / 1024:.0f} KiB in the mean are opened one by one; "
        f"timed on a sample of {min(len(files), SAMPLE)}, which the system already holds "
        "in memory: from a disk it is more",
        f"pack the samples into few files: {PACKERS}",
        "a file costs a look-up and a seek however small it is",
        "Aizman et al. 2019, WebDataset",
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = [path for path, _ in files[:SAMPLE]]
        packed = Path(folder, "packed")
        try:
            parts = [path.read_bytes() for path in paths]
            packed.write_bytes(b"".join(parts))
        except OSError as error:
            return [replace(row, reason=f"it failed: {first_line(error)}")]
        sizes = [len(part) for part in parts]
        return [
            _measured(
                row,
                lambda: [path.read_bytes() for path in paths],
                lambda: _read_parts(packed, sizes),
                seconds,
            )
        ]


def _read_parts(packed: Path, sizes: Iterable[int]) -> list[bytes]:
    with packed.open("rb") as file:
        return [file.read(size) for size in sizes]


def _ready_batches(
    workload: Workload, loading: Loading, seconds: float
) -> list[AdviceRow]:
    if loading.wait_share < WAIT_SHARE:
        return []
    parts = []
    if loading.resize_share > 0.02:
        parts.append(f"{loading.resize_share:.0%} of it resizing")
    if loading.decode_share > 0.02:
        parts.append(f"{loading.decode_share:.0%} decoding")
    detail = f" ({', '.join(parts)})" if parts else ""
    row = _row(
        "ready_samples",
        f"{loading.wait_share:.0%} of each step waits for its batch{detail}; timed "
        "against the same batches read back from one file",
        "resize and decode once, and store what the model reads: torch.save, numpy.memmap",
        "what is the same in every epoch is computed again in every epoch",
        "Mohan et al. 2021, Analyzing and mitigating data stalls in DNN training",
    )
    row = replace(row, share=loading.wait_share)
    if not loading.is_repeatable:
        reason = "another pass gives other batches: store what stands before that"
        return [replace(row, reason=reason)]
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder, "batches.pt")
        batches = workload.batches[:LOADED]
        try:
            torch.save(batches, stored)
        except TRIAL_ERRORS as error:
            return [replace(row, reason=f"it failed: {first_line(error)}")]
        return [
            _measured(
                row,
                lambda: list(islice(batches_anew(workload), len(batches))),
                lambda: torch.load(stored, weights_only=True),
                seconds,
            )
        ]


def _decoder(loading: Loading) -> list[AdviceRow]:
    if loading.decode_share < WAIT_SHARE:
        return []
    installed = [name for name in DECODERS if importlib.util.find_spec(name)]
    row = _row(
        "decoder",
        f"{loading.decode_share:.0%} of the loading decodes images",
        "a faster decoder (turbojpeg, torchvision.io, GPU), the same in training and use",
        "decoders differ several times in speed, and in the pixels they give",
        "NVIDIA DALI, issue 2966",
    )
    names = ", ".join(installed) or "none"
    reason = (
        f"their pixels differ, so that the author has to choose; installed: {names}"
    )
    return [replace(row, reason=reason)]


def _workers(
    loader: DataLoader[Any], loading: Loading, seconds: float, cores: int
) -> list[AdviceRow]:
    if loader.num_workers or loading.wait_share < WAIT_SHARE:
        return []
    row = _row(
        "workers",
        f"{loading.wait_share:.0%} of each step waits for its batch, which no worker "
        "prepares",
        f"DataLoader(..., num_workers={max(1, cores - 1)}, persistent_workers=True)",
        "workers load while the model computes",
        "PyTorch performance tuning guide",
    )
    row = replace(row, share=loading.wait_share)
    if cores < 2:
        return [replace(row, reason="one core: a worker would take the model's time")]
    return [_with_workers(row, loader, loading, seconds, cores - 1)]


def _with_workers(
    row: AdviceRow,
    loader: DataLoader[Any],
    loading: Loading,
    seconds: float,
    workers: int,
) -> AdviceRow:
    """Time passes over the loader, with work as long as a step after each batch."""
    try:
        other: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            collate_fn=loader.collate_fn,
            num_workers=workers,
            persistent_workers=True,
            timeout=60,
        )
        return _measured(
            row,
            lambda: _pass(loader, loading.step_seconds),
            lambda: _pass(other, loading.step_seconds),
            seconds,
        )
    except TRIAL_ERRORS as error:
        return replace(row, reason=f"it failed: {first_line(error)}")


def _pass(loader: DataLoader[Any], step_seconds: float) -> None:
    """Go through some batches, computing as long as a step after each."""
    for _ in islice(loader, LOADED):
        end = time.perf_counter() + step_seconds
        x = torch.ones(64, 64)
        while time.perf_counter() < end:
            x = torch.mm(x, x).clamp_(max=1.0)


def _pinned(loader: DataLoader[Any]) -> list[AdviceRow]:
    if loader.pin_memory:
        return []
    row = _row(
        "pinned_memory",
        "the batches are not in pinned memory",
        "DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True)",
        "copies to a GPU then run beside its kernels",
        "PyTorch performance tuning guide",
    )
    if not torch.cuda.is_available():
        return [replace(row, reason="there is no GPU to copy to")]
    return [_pinned_copies(row, loader)]


def _pinned_copies(row: AdviceRow, loader: DataLoader[Any]) -> AdviceRow:
    """Time the copies of a batch to the GPU, from pageable and from pinned memory."""
    device = torch.device("cuda")
    leaves = tree_leaves(next(iter(loader)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    pinned = [tensor.pin_memory() for tensor in tensors]
    speed = measure_speed(
        lambda: [tensor.to(device) for tensor in tensors],
        lambda: [tensor.to(device, non_blocking=True) for tensor in pinned],
        seconds=1.0,
        device=device,
    )
    return _judged(row, speed)
