"""The one pass over a tensor that capture makes: min, max, sum, sum of squares and
smallest magnitude, as one kernel.

``sums`` is a plain torch function, and so are ``counts``, for a tensor with zeros or
subnormals in it, and ``masked_sums``, for one with NaN or Inf. Large contiguous CPU
tensors go through its ahead-of-time compiled form (vectorised C++ made by torch's own
compiler, once for a machine and torch version, in another process, so that the program
that is recorded never loads the compiler); everything else, and machines without a C++
compiler, run it eagerly in chunks that fit a core's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("roundoff")

#: Elements of one call: counts are summed in fp32, which holds every whole number up to
#: 2**24.
LARGEST = 2**24
#: Elements of one eager chunk: 1 MiB of fp32, half of a core's second-level cache.
CHUNK = 2**18
#: Elements of one row: short enough to be summed without a cascade (256 terms for each of
#: 4 lanes of fp32 and more).
ROW = 1024
#: The compiled form exists for these; the others are rare in training and go the eager way.
COMPILED = (torch.float32, torch.bfloat16, torch.float16)


def sums(x: Tensor) -> Tensor:
    """Return ``[min, max, sum, sum of squares, min of the magnitudes]`` of a tensor of
    shape ``(rows, n)``, n a multiple of 4, in fp32; NaN in it shows in all of them, an
    infinity in min or max.
    """
    # quarters of a row side by side: one accumulator alone would wait for its own last
    # addition
    a, b, c, d = x.to(torch.float32).view(x.shape[0], 4, -1).unbind(1)
    low = torch.minimum(torch.minimum(a, b), torch.minimum(c, d))
    high = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
    nearest = torch.minimum(
        torch.minimum(a.abs(), b.abs()), torch.minimum(c.abs(), d.abs())
    )
    return torch.stack(
        [
            low.amin(1).amin(),
            high.amax(1).amax(),
            ((a + b) + (c + d)).sum(1).sum(),
            ((a * a + b * b) + (c * c + d * d)).sum(1).sum(),
            nearest.amin(1).amin(),
        ]
    )


def counts(x: Tensor) -> Tensor:
    """Return ``[zeros, zeros and subnormals]`` of a tensor of shape ``(rows, n)``, in fp32."""
    smallest = torch.finfo(x.dtype).tiny
    wide = x.to(torch.float32)
    zeros = (wide == 0).to(torch.float32).sum(1)
    return torch.stack(
        [zeros.sum(), (wide.abs() < smallest).to(torch.float32).sum(1).sum()]
    )


def masked_sums(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return
    ``[min, max, sum of (x - shift) scale, sum of its squares, finite, NaN, +Inf, -Inf, zeros, subnormals]``,
    all but the counts over the finite elements of ``x``, shape ``(rows, n)``; where
    ``sums`` overflows or loses its digits.
    """
    smallest = torch.finfo(x.dtype).tiny
    wide = x.to(torch.float32)
    size = wide.abs()
    finite = size < math.inf
    y = torch.where(finite, (wide - shift) * scale, 0.0)
    marks = (
        finite,
        wide != wide,
        wide == math.inf,
        wide == -math.inf,
        wide == 0,
        (size < smallest) & (wide != 0),
    )
    low = torch.where(finite, wide, math.inf).amin(1).amin()
    high = torch.where(finite, wide, -math.inf).amax(1).amax()
    return torch.stack(
        [
            low,
            high,
            y.sum(1).sum(),
            (y * y).sum(1).sum(),
            *(m.to(torch.float32).sum(1).sum() for m in marks),
        ]
    )


def errors(x: Tensor, reference: Tensor) -> Tensor:
    """Return
    ``[max of |x - reference|, sum of its squares, max of |reference|, sum of its squares]``
    of two tensors of shape ``(rows, n)``, n a multiple of 4, in fp64; not finite where
    one of them is not.
    """
    quarters = x.to(torch.float64).view(x.shape[0], 4, -1)
    true = reference.view(x.shape[0], 4, -1)
    a, b, c, d = (quarters - true).abs().unbind(1)
    e, f, g, h = true.abs().unbind(1)
    most = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
    size = torch.maximum(torch.maximum(e, f), torch.maximum(g, h))
    return torch.stack(
        [
            most.amax(1).amax(),
            ((a * a + b * b) + (c * c + d * d)).sum(1).sum(),
            size.amax(1).amax(),
            ((e * e + f * f) + (g * g + h * h)).sum(1).sum(),
        ]
    )


Compiled = Callable[[list[Tensor]], list[Tensor]]


@lru_cache
def compiled(name: str, dtype: torch.dtype) -> Compiled | None:
    """A kernel compiled for contiguous CPU tensors of shape ``(rows, ROW)``, rows from 2
    on; None where it cannot be compiled.

    Those of this file run on the caller's thread, since waking threads beside a running
    program costs more than it saves; a ``Kernel`` may ask for torch's threads.
    """
    if os.environ.get("ROUNDOFF_KERNEL") == "eager":
        return None
    path = _package(name, dtype)
    if not path.exists() and not _build(path, name, dtype):
        return None
    inputs = _inputs(name, dtype, 2)
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        run: Compiled = loader.boxed_run
        output = run(list(inputs))[0]
    except (RuntimeError, AttributeError, OSError):
        return None
    expected = KERNELS[name].function(*inputs)
    return run if torch.allclose(output, expected, rtol=1e-4) else None


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sums": sums,
    "counts": counts,
    "masked_sums": masked_sums,
    "errors": errors,
}


class Kernel(NamedTuple):
    """A function to compile.

    ``inputs(dtype, rows)`` are examples of what it takes, tensors of shape ``(rows,
    n)``, whose rows may be any number from 2 on, or scalars. What it calls is in
    ``helpers``, so that a change compiles it again.
    """

    function: Callable[..., Tensor]
    inputs: Callable[[torch.dtype, int], list[Tensor]]
    helpers: tuple[Callable[..., object], ...] = ()
    #: On as many threads as ``torch.get_num_threads()`` says, torch's own.
    threads: bool = False


def _package(name: str, dtype: torch.dtype) -> Path:
    """Return the file for this torch, processor and version of the function, in the user's
    cache folder."""
    kernel = KERNELS[name]
    functions = (kernel.function, *kernel.helpers)
    source = "".join(map(inspect.getsource, functions))
    capability = torch.backends.cpu.get_cpu_capability()
    machine = f"{torch.__version__} {platform.machine()} {capability} {dtype}"
    if kernel.threads:
        machine += " on torch's threads"
    key = hashlib.sha256((source + machine).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "roundoff" / f"{name}-{key}.pt2"


def _build(path: Path, name: str, dtype: torch.dtype) -> bool:
    """Compile a kernel in another process; return False if that fails, or has before."""
    failed = path.with_suffix(".failed")
    if failed.exists() or shutil.which(_compiler()) is None:
        return False  # at once, in every process
    dtype_name = str(dtype).removeprefix("torch.")
    log.warning(
        "compiling %s of %s, once on this machine (some 10 seconds)", name, dtype_name
    )
    module = KERNELS[name].function.__module__
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        done = _run_compilation(str(path), name, dtype_name, module)
    except (OSError, subprocess.SubprocessError):
        return False
    if done.returncode == 0 and path.exists():
        return True
    log.warning(
        "it could not be compiled, so torch's own operators do it; delete %s to try "
        "again",
        failed,
    )
    with contextlib.suppress(OSError):
        failed.write_bytes(done.stderr)
    return False


def _compiler() -> str:
    default = "clang++" if sys.platform == "darwin" else "g++"
    return os.environ.get("CXX") or default


def _run_compilation(*words: str) -> subprocess.CompletedProcess[bytes]:
    # the program under capture may have changed what Python imports, or be one of
    # several processes that build
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return subprocess.run(
        [sys.executable, "-m", "roundoff.record.statistics_kernel", *words],
        capture_output=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))},
    )


def _inputs(name: str, dtype: torch.dtype, rows: int) -> list[Tensor]:
    return KERNELS[name].inputs(dtype, rows)


def probe(dtype: torch.dtype, rows: int) -> Tensor:
    """Whole numbers on both sides of zero, shape ``(rows, ROW)``."""
    return torch.arange(-ROW, ROW).repeat(rows // 2).view(rows, ROW).to(dtype)


#: What ``compiled`` knows by name; other packages add theirs when they are imported.
KERNELS: dict[str, Kernel] = {
    "sums": Kernel(sums, lambda dtype, rows: [probe(dtype, rows)]),
    "counts": Kernel(counts, lambda dtype, rows: [probe(dtype, rows)]),
    "masked_sums": Kernel(
        masked_sums,
        lambda dtype, rows: [probe(dtype, rows), torch.tensor(1.0), torch.tensor(0.5)],
    ),
    "errors": Kernel(
        errors,
        lambda dtype, rows: [probe(dtype, rows), probe(torch.float64, rows) * 1.125],
    ),
}


def _compile(path: str, name: str, dtype: str) -> None:
    """Runs in the process that ``_build`` starts."""
    kernel = KERNELS[name]

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return kernel.function(*inputs)

    rows = {0: torch.export.Dim("rows", min=2, max=2**16)}
    example = kernel.inputs(getattr(torch, dtype), 64)
    shapes = (tuple(rows if value.dim() else {} for value in example),)
    program = torch.export.export(Module(), tuple(example), dynamic_shapes=shapes)
    partial = f"{path}.{os.getpid()}.pt2"
    # the number of threads is asked for in each call, or is one
    configs: dict[str, bool | int] = {"cpp.threads": 1}
    if kernel.threads:
        configs = {"cpp.dynamic_threads": True}
    if kernel.helpers:  # all in one loop, however long its body
        configs |= {"realize_opcount_threshold": 1000, "realize_reads_threshold": 1000}
    torch._inductor.aoti_compile_and_package(
        program, package_path=partial, inductor_configs=configs
    )
    os.replace(partial, path)


if __name__ == "__main__":
    import torch._inductor

    # adds its kernels to those of the module that it imports, not of this script
    importlib.import_module(sys.argv[4])
    this_module = importlib.import_module("roundoff.record.statistics_kernel")
    this_module._compile(*sys.argv[1:4])
