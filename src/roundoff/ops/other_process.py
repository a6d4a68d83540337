"""A process that runs the calls of recordings of other users, with limits.

It writes no file, takes so much memory and so much time, and may crash without harm: a
kernel that does not check what it is given reads or writes there, and not here. Calls
and results go through its pipes as JSON and the bytes of tensors; nothing is unpickled.
After a crash, or a call that took too long, no further call of the recording is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from roundoff.ops.refusals import Reason
from roundoff.preserve import as_bytes

#: Beyond what it has when it begins.
MEMORY = 8 * 2**30
#: Bytes of a tensor that is sent to it or comes back.
LARGEST_TENSOR = 4 * 2**30
#: Seconds of a call, and bytes of its tensors for each further one.
SECONDS = 5.0
BYTES_A_SECOND = 10 * 2**20
#: Until it is there: importing torch.
STARTING = 60.0
_LONGEST_HEADER = 2**24

#: The process finds roundoff where this one does.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from roundoff.ops.other_process import serve
serve()
"""


@dataclass(frozen=True)
class RecordedCall:
    """A call as a recording has it, and its tensors by record."""

    overload: str
    arguments: str
    tensors: dict[int, Tensor]
    dtype: torch.dtype | None
    device: torch.device | str | None
    exact_as_is: bool

    @property
    def seconds(self) -> float:
        """How long it may take."""
        return SECONDS + sum(t.nbytes for t in self.tensors.values()) / BYTES_A_SECOND


class _Ended(Exception):  # noqa: N818 - becomes a reason
    """The process has ended, or did not answer in time."""


class OtherProcess:
    """The process, started with the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        #: Why no further call is run.
        self._over: str | None = None

    def run(self, call: RecordedCall) -> list[Tensor | None] | Reason:
        """Return what the call gives there, or why it does not."""
        if self._over is not None:
            return Reason(self._over)
        try:
            process = self._started(call)
            _send(process.stdin, _header_of(call), list(call.tensors.values()))
            header, tensors = _receive(process.stdout, call.seconds)
        except (_Ended, OSError, ValueError, KeyError, TypeError) as error:
            self._over = f"not run again: {self._how_it_ended(error)}"
            self.close()
            return Reason(self._over)
        if header.get("reason") is not None:
            return Reason(str(header["reason"])[:300], bool(header.get("is_exact")))
        following = iter(tensors)
        places = header.get("results")
        places = places if isinstance(places, list) else []
        return [next(following, None) if is_there else None for is_there in places]

    def close(self) -> None:
        """End the process."""
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()

    def _started(self, call: RecordedCall) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        on_cpu = call.device is None or torch.device(call.device).type == "cpu"
        environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        _send(self._process.stdin, {"memory": MEMORY if on_cpu else None}, [])
        _receive(self._process.stdout, STARTING)
        return self._process

    def _how_it_ended(self, error: Exception) -> str:
        process = self._process
        if process is None:
            return "the process for it could not be started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        code = process.returncode
        if code is None:
            return f"a call of this recording {error}"
        return f"a call of this recording ended the process (exit code {code})"


def serve() -> None:
    """Answer calls until the pipe is closed: what the other process does."""
    from roundoff.ops.from_recording import run_in_other_process

    # what a kernel prints must not get between the answers
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    source = _Source(sys.stdin.buffer)
    begin, _ = _read(source)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _limit(begin.get("memory"))
    _send(output, {}, [])
    while True:
        try:
            header, tensors = _read(source)
        except _Ended:
            return
        dtype = header["dtype"]
        results = run_in_other_process(
            header["overload"],
            header["arguments"],
            dict(zip(header["records"], tensors, strict=True)),
            None if dtype is None else getattr(torch, dtype),
            header["device"],
            header["exact_as_is"],
        )
        if isinstance(results, Reason):
            _send(output, {"reason": results.text, "is_exact": results.is_exact}, [])
            continue
        present = [tensor for tensor in results if tensor is not None]
        _send(output, {"results": [t is not None for t in results]}, present)


def _limit(memory: int | None) -> None:
    """Allow no file to be written, no core, and so much further memory."""
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    status = Path("/proc/self/statm")
    if memory is not None and status.exists():
        pages = int(status.read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))


# -- messages: the length of a header, the header in JSON, the bytes of its tensors -----


def _header_of(call: RecordedCall) -> dict[str, Any]:
    return {
        "overload": call.overload,
        "arguments": call.arguments,
        "records": list(call.tensors),
        "dtype": None if call.dtype is None else str(call.dtype).removeprefix("torch."),
        "device": None if call.device is None else str(call.device),
        "exact_as_is": call.exact_as_is,
    }


def _send(
    pipe: IO[bytes] | None, header: dict[str, Any], tensors: list[Tensor]
) -> None:
    if pipe is None:
        raise _Ended("has no pipe")
    plain = [_plain(tensor) for tensor in tensors]
    described = [
        {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
            "order": _order(original),
        }
        for tensor, original in zip(plain, tensors, strict=True)
    ]
    text = json.dumps({**header, "tensors": described}).encode()
    pipe.write(len(text).to_bytes(8, "little") + text)
    for tensor in plain:
        pipe.write(as_bytes(tensor).numpy().data)
    pipe.flush()


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor on the host and contiguous in the order of its strides."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    return plain.permute(_order(tensor)).contiguous()


def _order(tensor: Tensor) -> list[int]:
    """Return the axes from the one with the largest stride to the one with the least."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: -strides[axis])


def _receive(
    pipe: IO[bytes] | None, seconds: float
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return an answer. Raises ``_Ended`` where it is not there in time."""
    if pipe is None:
        raise _Ended("has no pipe")
    return _read(_Source(pipe, seconds))


class _Source:
    """Bytes of a pipe; those of an answer have to be there by a deadline."""

    def __init__(self, pipe: IO[bytes], seconds: float | None = None) -> None:
        self._descriptor = pipe.fileno()
        self._seconds = seconds
        self._until = None if seconds is None else time.monotonic() + seconds

    def read(self, count: int) -> bytearray:
        """Return so many bytes. Raises ``_Ended`` where they do not come."""
        content = bytearray()
        while len(content) < count:
            self._wait()
            block = os.read(self._descriptor, min(count - len(content), 2**20))
            if not block:
                raise _Ended("ended")
            content += block
        return content

    def _wait(self) -> None:
        if self._until is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            if not selector.select(max(0.0, self._until - time.monotonic())):
                raise _Ended(f"took more than {self._seconds:.0f} s")


def _read(source: _Source) -> tuple[dict[str, Any], list[Tensor]]:
    length = int.from_bytes(source.read(8), "little")
    if length > _LONGEST_HEADER:
        raise _Ended("gave an answer that is none")
    header = json.loads(source.read(length))
    if not isinstance(header, dict):
        raise _Ended("gave an answer that is none")
    return header, [_tensor(source, described) for described in header["tensors"]]


def _tensor(source: _Source, described: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, str(described["dtype"]), None)
    size = int(described["bytes"])
    if not isinstance(dtype, torch.dtype) or not 0 <= size <= LARGEST_TENSOR:
        raise _Ended("gave an answer that is none")
    content = source.read(size)
    shape = [int(each) for each in described["shape"]]
    places = _inverse([int(each) for each in described["order"]])
    if not content:
        return torch.empty([shape[place] for place in places], dtype=dtype)
    flat = torch.frombuffer(content, dtype=torch.uint8).view(dtype)
    return flat.reshape(shape).permute(places)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]
