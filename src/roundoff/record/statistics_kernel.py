"""The one pass over a tensor that capture makes: min, max, sum, sum of squares and
smallest magnitude, as one kernel.

``sums`` is a plain torch function, and so are ``counts``, for a tensor with zeros or
subnormals in it, and ``masked_sums``, for one with NaN or Inf. They say what is
computed, and run eagerly in chunks that fit a core's cache where there is no C++
compiler. Large contiguous CPU tensors go through the same passes in ``kernels.cpp``. All
of them are compiled in a second or two, once on a machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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
    ``[min, max, sum of x scale - shift, sum of its squares, finite, NaN, +Inf, -Inf, zeros, subnormals]``,
    all but the counts over the finite elements of ``x``, shape ``(rows, n)``; where
    ``sums`` overflows or loses its digits. The scale comes first: the difference of two
    of the largest numbers is no number.
    """
    smallest = torch.finfo(x.dtype).tiny
    wide = x.to(torch.float32)
    size = wide.abs()
    finite = size < math.inf
    y = torch.where(finite, wide * scale - shift, 0.0)
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


#: Takes the inputs of a kernel, returns its output: in fp64, but for fp32 of the rows of
#: two tensors.
Compiled = Callable[[list[Tensor]], NDArray[Any]]


@lru_cache
def compiled(name: str, dtype: torch.dtype) -> Compiled | None:
    """A kernel compiled for contiguous CPU tensors of shape ``(rows, ROW)``, rows from 2
    on; None where it cannot be compiled.

    Those of this file run on the caller's thread, since waking threads beside a running
    program costs more than it saves; a ``Kernel`` may ask for torch's threads.
    """
    kernel = KERNELS[name]
    library = None if os.environ.get("ROUNDOFF_KERNEL") == "eager" else _library()
    if library is None:
        return None
    type_name = str(dtype).removeprefix("torch.")
    symbol = f"{name}_{type_name}" if kernel.for_each_type else name
    inputs = kernel.inputs(dtype, 2)
    run = _runner(library[symbol], kernel, len(inputs))
    expected = kernel.function(*inputs).double().numpy()
    return run if np.allclose(run(inputs), expected, rtol=1e-4) else None


def _runner(function: Any, kernel: Kernel, inputs: int) -> Compiled:
    """Return a function of that many tensors, from one of addresses."""
    function.restype = None
    types: list[Any] = [ctypes.c_void_p] * inputs + [ctypes.c_int64, ctypes.c_void_p]
    function.argtypes = [*types, ctypes.c_int] if kernel.threads else types
    outputs = kernel.outputs

    def run(tensors: list[Tensor]) -> NDArray[Any]:
        rows = len(tensors[0])
        if kernel.for_each_type:
            output: NDArray[Any] = np.empty(outputs, np.float64)
        else:
            output = np.empty((outputs, rows), np.float32)
        addresses = [tensor.data_ptr() for tensor in tensors]
        threads = [torch.get_num_threads()] if kernel.threads else []
        function(*addresses, rows, output.ctypes.data, *threads)
        return output

    return run


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sums": sums,
    "counts": counts,
    "masked_sums": masked_sums,
    "errors": errors,
}


class Kernel(NamedTuple):
    """A function in torch, and its twin of the same name in ``kernels.cpp``.

    ``inputs(dtype, rows)`` are examples of what it takes, tensors of shape ``(rows,
    n)``, whose rows may be any number from 2 on, or scalars.
    """

    function: Callable[..., Tensor]
    inputs: Callable[[torch.dtype, int], list[Tensor]]
    #: Numbers that it returns: of all rows, in fp64, or of each row, in fp32.
    outputs: int
    #: There is one for each of ``COMPILED``, and it returns numbers of all rows.
    for_each_type: bool = True
    #: On as many threads as ``torch.get_num_threads()`` says, torch's own.
    threads: bool = False


def _library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None where they cannot be compiled."""
    source = Path(__file__).with_name("kernels.cpp")
    flags = _flags()
    machine = " ".join([platform.machine(), *flags])
    key = hashlib.sha256(source.read_bytes() + machine.encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "roundoff" / f"kernels-{key.hexdigest()[:16]}.so"
    if not path.exists() and not _build(path, [*flags, str(source)]):
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _flags() -> list[str]:
    """Return what the compiler is told, which tells machines of one cache folder apart."""
    flags = ["-std=c++17", "-O3", "-fwrapv", "-ffp-contract=off", "-fno-trapping-math"]
    flags += ["-fno-math-errno", "-shared", "-fPIC", "-Wno-psabi"]
    if sys.platform != "darwin":  # whose compiler has no OpenMP of its own
        flags.append("-fopenmp")
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        flags += ["-mavx2", "-mfma", "-mf16c"]
    return flags


def _build(path: Path, arguments: list[str]) -> bool:
    """Compile the kernels; return False if that fails, or has before.

    Two processes at once compile twice: a lock would outlast a process that is killed.
    """
    failed = path.with_suffix(".failed")
    if failed.exists() or shutil.which(_compiler()) is None:
        return False  # at once, in every process
    log.info("compiling the passes over tensors, once on this machine (some seconds)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder, path.name)
            done = _run_compiler([*arguments, "-o", str(partial)])
            if done.returncode == 0:
                os.replace(partial, path)
                return True
    except (OSError, subprocess.SubprocessError):
        return False
    log.warning(
        "the passes over tensors could not be compiled, so torch's own operators do it; "
        "delete %s to try again",
        failed,
    )
    with contextlib.suppress(OSError):
        failed.write_bytes(done.stderr)
    return False


def _compiler() -> str:
    default = "clang++" if sys.platform == "darwin" else "g++"
    return os.environ.get("CXX") or default


def _run_compiler(arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [_compiler(), *arguments], capture_output=True, check=False, timeout=300
    )


def probe(dtype: torch.dtype, rows: int) -> Tensor:
    """Whole numbers on both sides of zero, shape ``(rows, ROW)``."""
    return torch.arange(-ROW, ROW).repeat(rows // 2).view(rows, ROW).to(dtype)


#: What ``compiled`` knows by name; other packages add theirs when they are imported.
KERNELS: dict[str, Kernel] = {
    "sums": Kernel(sums, lambda dtype, rows: [probe(dtype, rows)], 5),
    "counts": Kernel(counts, lambda dtype, rows: [probe(dtype, rows)], 2),
    "masked_sums": Kernel(
        masked_sums,
        lambda dtype, rows: [probe(dtype, rows), torch.tensor(1.0), torch.tensor(0.5)],
        10,
    ),
    "errors": Kernel(
        errors,
        lambda dtype, rows: [probe(dtype, rows), probe(torch.float64, rows) * 1.125],
        4,
    ),
}
