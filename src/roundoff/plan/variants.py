"""The candidates of ``roundoff diagnose --candidate``: what each changes in the way a
workload runs.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from roundoff.errors import FormatError, WorkloadError
from roundoff.formats import parse_format
from roundoff.workload import Workload, describe

#: Formats that torch.autocast computes in.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Candidates that change how the same program runs.
PROGRAMS = ("compile", "channels_last", "float64", "fp64")
EXPECTED = (
    "bf16 or fp16, compile, a device such as cuda, channels_last, threads=N, mkldnn=off, float64, or another "
    "workload file (.py)"
)

Change = Callable[[Workload], Workload]
Around = Callable[[], AbstractContextManager[Any]]


def same(workload: Workload) -> Workload:
    """The workload as it is."""
    return workload


@dataclass(frozen=True)
class Variant:
    """One way to run a workload.

    Attributes:
        name: as the user calls it.
        workload: what runs; that of the reference, or the candidate's own.
        change: gets the workload and gives what runs in its place; called where
            everything is restored afterwards.
        around: entered for the forward pass and the loss, not for the backward pass;
            left out in fp64.
        format: the number format that a plan is for; None where the candidate is no format.
        unit: unit roundoff of the format it computes in, where that is not the model's
            own; else None.
        notes: what a reader has to know of it.
        batches: of a workload file its own ones, which are not what runs.
    """

    name: str
    workload: Workload
    change: Change = same
    around: Around = nullcontext
    format: str | None = None
    unit: float | None = None
    notes: tuple[str, ...] = ()
    batches: list[Any] | None = None


def variant(
    workload: Workload,
    candidate: str | Path,
    *,
    steps: int = 1,
    backend: str | None = None,
) -> Variant:
    """The variant of ``workload`` that ``candidate`` names.

    Raises ``FormatError`` for a format that torch cannot run a model in, and
    ``WorkloadError`` for what is unknown or not possible on this machine, and for a
    workload file that takes other batches.
    """
    name = str(candidate)
    setting, mark, value = name.partition("=")
    if backend is not None and name != "compile":
        raise WorkloadError(
            "a backend is one of torch.compile",
            where="backend",
            expected="the candidate compile",
            got=repr(name),
        )
    check_candidate(name)
    if name.endswith(".py"):
        return _other(workload, candidate, steps)
    if mark:
        return Variant(
            name, workload, partial(_set, setting=setting_of(name, setting, value))
        )
    if name == "compile":
        return Variant(
            name,
            workload,
            partial(compiled, backend=compile_backend(workload, backend)),
        )
    if name == "channels_last":
        return Variant(name, workload, channels_last)
    if name in ("float64", "fp64"):
        return Variant(name, workload, double)
    try:
        fmt = parse_format(name)
    except FormatError:
        return Variant(name, workload, partial(moved, device=find_device(name)))
    return _autocast(name, workload, fmt.name)


def check_candidate(name: str) -> None:
    """Raise ``WorkloadError`` or ``FormatError`` for what ``variant`` does not know.

    No model is needed; a workload file is only looked for.
    """
    setting, mark, value = name.partition("=")
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise WorkloadError("no such file", where="candidate", got=repr(name))
        return
    if mark:
        setting_of(name, setting, value)
        return
    if name in PROGRAMS:
        return
    try:
        fmt = parse_format(name)
    except FormatError:
        find_device(name)
        return
    if fmt.name not in AUTOCAST:
        raise FormatError(
            f"torch cannot run a model in {fmt.name}, so there is nothing to record",
            where=f"candidate {name}",
            expected=" or ".join(AUTOCAST),
            do=f"leave the candidate out: 'roundoff diagnose WORKLOAD --formats {name}' "
            "measures what the format costs by simulation",
        )


def _autocast(name: str, workload: Workload, fmt: str) -> Variant:
    dtype = AUTOCAST[fmt]
    device = device_of(workload.model).type
    unscaled = fmt == "fp16" and workload.loss is not None
    return Variant(
        name,
        workload,
        around=partial(torch.autocast, device, dtype),
        format=fmt,
        unit=torch.finfo(dtype).eps / 2,
        notes=("gradients in fp16 without a loss scale",) if unscaled else (),
    )


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer is; the CPU for a model that has none."""
    return next(
        (t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu")
    )


def double(workload: Workload) -> Workload:
    """The workload in fp64: parameters, buffers, batches, and what the program makes
    without naming a format; complex numbers in complex128.
    """
    torch.set_default_dtype(torch.float64)
    workload.model.double()
    for tensor in (*workload.model.parameters(), *workload.model.buffers()):
        tensor.data = _doubled(tensor.data)
    return with_batches(workload, _doubled)


def _doubled(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def with_batches(
    workload: Workload,
    change: Callable[[Tensor], Tensor],
    model: nn.Module | None = None,
) -> Workload:
    """The same workload with the tensors of its batches changed, and with another model
    where one is given.
    """

    def changed(batches: list[Any]) -> list[Any]:
        return [
            tree_map(
                lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, batch
            )
            for batch in batches
        ]

    twin = workload.with_model(workload.model if model is None else model)
    twin.batches = changed(workload.batches)
    twin.held_out = changed(workload.held_out)
    return twin


@contextmanager
def values_kept(model: nn.Module) -> Iterator[None]:
    """Write the values of the parameters back at the end, bit by bit: an optimizer changes them."""
    saved = [(p, p.detach().clone()) for p in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


def moved(workload: Workload, device: torch.device) -> Workload:
    """The workload on another device."""
    workload.model.to(device)
    return with_batches(workload, lambda t: t.to(device))


def channels_last(workload: Workload) -> Workload:
    """The workload with images and weights of convolutions in the order of memory that
    is called channels last.
    """
    form = torch.channels_last
    workload.model.to(memory_format=form)  # type: ignore[call-overload]
    return with_batches(
        workload, lambda t: t.contiguous(memory_format=form) if t.dim() == 4 else t
    )


def compiled(workload: Workload, backend: str) -> Workload:
    """The workload with its model compiled; the parameters are the same ones."""
    model = torch.compile(workload.model, backend=backend)
    return with_batches(workload, lambda t: t, model)  # type: ignore[arg-type]


def compile_backend(workload: Workload, backend: str | None) -> str:
    """The backend of torch.compile, or a ``WorkloadError`` that says why it cannot run here."""
    if backend is not None:
        check_backend(backend)
    compilers = (os.environ.get("CXX") or "", "g++", "clang++", "c++", "cl")
    on_cpu = device_of(workload.model).type == "cpu"
    needs_compiler = backend in (None, "inductor") and on_cpu
    if needs_compiler and not any(map(shutil.which, compilers)):
        raise WorkloadError(
            "torch.compile needs a C++ compiler, and there is none",
            where="candidate compile",
            expected="g++ or clang++",
            do="install one, or give --backend aot_eager, which shows the same operators uncompiled",
        )
    return backend or "inductor"


def check_backend(backend: str) -> None:
    """Raise ``WorkloadError`` for a name that is no backend of torch.compile."""
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise WorkloadError(
            "torch.compile has no such backend",
            where="backend",
            expected=", ".join(backends),
            got=repr(backend),
        )


def setting_of(name: str, setting: str, value: str) -> Callable[[], None]:
    """What makes a setting of torch as ``threads=N`` or ``mkldnn=off`` says;
    ``WorkloadError`` for others.
    """
    if setting == "threads" and value.isdigit() and int(value):
        return partial(torch.set_num_threads, int(value))
    if setting == "mkldnn" and value in ("on", "off"):
        return partial(setattr, torch.backends.mkldnn, "enabled", value == "on")
    raise _unknown(name)


def _set(workload: Workload, setting: Callable[[], None]) -> Workload:
    setting()
    return workload


def find_device(name: str) -> torch.device:
    """A device that exists and works; ``WorkloadError`` otherwise."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _unknown(name) from None
    if device.type == "meta":
        raise _unknown(name)
    try:
        torch.zeros(1, device=device).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise WorkloadError(
            f"there is no device {name} here",
            where=f"candidate {name}",
            got=str(error).partition("\n")[0],
            do="run this on a machine that has one, with a torch that is built for it",
        ) from error
    return device


def _unknown(name: str) -> WorkloadError:
    return WorkloadError(
        "there is no such candidate",
        where="candidate",
        expected=EXPECTED,
        got=repr(name),
    )


def _other(workload: Workload, source: str | Path, steps: int) -> Variant:
    """Another workload file, fed the batches of the reference; it may define none itself."""
    other = Workload.load(source, batches=workload.batches)
    for number in range(min(steps, len(workload.batches))):
        ours = describe(workload.batches[number])
        theirs = "no such batch"
        if number < len(other.batches):
            theirs = describe(other.batches[number])
        if ours != theirs:
            raise WorkloadError(
                f"batch {number} is another one than that of {workload.name}",
                where=str(source),
                expected=ours,
                got=theirs,
                do="give both workloads batches of the same shapes and types",
            )
    twin = copy.copy(other)
    twin.batches = workload.batches
    twin.forward = other.forward or workload.forward
    twin.loss = workload.loss and (other.loss or workload.loss)
    twin.optimizer = workload.optimizer and (other.optimizer or workload.optimizer)
    notes = _differences(workload, other)
    return Variant(str(source), twin, notes=tuple(notes), batches=other.batches)


def _differences(workload: Workload, other: Workload) -> Iterator[str]:
    """Say how the two programs differ before anything runs."""
    reference = dict(workload.model.state_dict())
    candidate = dict(other.model.state_dict())
    common = [name for name in reference if name in candidate]
    changed = [n for n in common if not _same_values(reference[n], candidate[n])]
    only_reference = [name for name in reference if name not in candidate]
    only_candidate = [name for name in candidate if name not in reference]
    yield from _named("the models start from other values", changed)
    if only_reference and only_candidate:
        yield (
            f"{len(only_reference):,} parameters and buffers have names that only the "
            f"reference knows, {len(only_candidate):,} names that only the candidate "
            "knows: these are matched by their values"
        )
    else:
        yield from _named("only the reference has", only_reference)
        yield from _named("only the candidate has", only_candidate)
    for part in ("loss", "optimizer"):
        if getattr(workload, part) is None and getattr(other, part) is not None:
            yield f"only the candidate defines {part}: it is not run"
    if workload.model.training != other.model.training:
        yield "one of the models is in training mode, the other is not"


def _named(difference: str, names: list[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{difference}: {', '.join(names[:3])}{more}"


def _same_values(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
