"""Tensors on disk: safetensors files of a bounded size, each content once, every dtype
bit for bit.
"""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from roundoff.foreign import regular
from roundoff.preserve import as_bytes

#: Small enough that most of a step is written while the step runs.
CHUNK_BYTES = 32 * 2**20
METADATA = "roundoff"

# Dtypes that every version of safetensors reads back. All others are stored as their
# bytes, and the metadata says what they are.
NATIVE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


def content_hash(tensor: torch.Tensor) -> str:
    """Return xxh3_128, in hex, of dtype, shape and bytes in row-major order.

    Equal for tensors with equal bits however they are strided and wherever they are, so
    0.0 and -0.0 differ, and NaNs of different payload do. Raises ``TypeError`` for what
    has no plain bytes: sparse, nested and quantized tensors.

    >>> ones = torch.ones(2, 3)
    >>> content_hash(ones) == content_hash(torch.ones(3, 2).T)
    True
    >>> content_hash(ones) == content_hash(ones.int())
    False
    """
    return _hash(_plain(tensor))


class Chunks:
    """Writes the tensors of one step into ``tensors-000.safetensors``,
    ``tensors-001...`` of a folder.

    A full chunk is written by a thread while the next one fills: at most two chunks, or
    a larger single tensor beside each, are in memory. Errors of the thread are raised
    by the next call.

    Attributes:
        checksums: file name -> bytes and xxh3_128 of every finished file.
    """

    def __init__(self, folder: Path, limit: int = CHUNK_BYTES) -> None:
        self.folder = folder
        self.limit = limit
        self.checksums: dict[str, dict[str, int | str]] = {}
        self._keys: dict[str, str] = {}  # content hash -> key
        self._names: set[str] = set()
        self._filling: dict[str, torch.Tensor] = {}
        self._described: dict[str, dict[str, object]] = {}
        self._bytes = 0
        self._files = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, key: str, tensor: torch.Tensor) -> str:
        """Store a copy of the tensor as it is now.

        Returns the key under which it is found: an earlier one where that has the same
        dtype, shape and bytes. Raises ``TypeError`` for what has no plain bytes,
        ``ValueError`` where another tensor has the key, and whatever the thread met.
        """
        plain = _plain(tensor)
        digest = _hash(plain)
        if digest in self._keys:
            return self._keys[digest]
        if key in self._names:
            raise ValueError(f"two different tensors have the key {key!r}")
        self._keys[digest] = key
        self._names.add(key)
        size = plain.numel() * plain.element_size()
        if self._filling and self._bytes + size > self.limit:
            self._flush()
        if plain.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            # training goes on and may change it before it is written
            plain = plain.clone()
        native = plain.dtype in NATIVE
        self._filling[key] = plain if native else as_bytes(plain)
        self._described[key] = {"xxh3_128": digest}
        if not native:
            self._described[key] |= {
                "dtype": _name(plain.dtype),
                "shape": list(plain.shape),
            }
        self._bytes += size
        if self._bytes >= self.limit:
            self._flush()
        return key

    def discard(self) -> None:
        """Drop every tensor, those in files too. Raises whatever the thread met."""
        self._join()
        self._forget()
        for name in self.checksums:
            (self.folder / name).unlink()
        self.checksums = {}
        self._keys = {}
        self._names = set()

    def finish(self) -> None:
        """Write what is left and wait until all is on disk."""
        if self._filling:
            self._flush()
        self._join()

    def abandon(self) -> None:
        """Drop what is not written, and wait for the thread; raises nothing."""
        self._forget()
        if self._thread is not None:
            self._thread.join()

    def _forget(self) -> None:
        self._filling = {}
        self._described = {}
        self._bytes = 0

    def _flush(self) -> None:
        self._join()
        path = self.folder / f"tensors-{self._files:03d}.safetensors"
        work = (path, self._filling, self._described)
        self._files += 1
        self._forget()
        thread = threading.Thread(
            target=self._write, args=work, name=f"write {path.name}"
        )
        thread.start()
        self._thread = thread

    def _write(
        self,
        path: Path,
        tensors: dict[str, torch.Tensor],
        described: dict[str, dict[str, object]],
    ) -> None:
        try:
            save_file(tensors, path, metadata={METADATA: json.dumps(described)})
            # safetensors makes files readable by their owner alone; the folder has the
            # user's umask
            path.chmod(self.folder.stat().st_mode & 0o666)
            self.checksums[path.name] = checksum(path)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits for it
            self._error = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        if error is not None:
            self._error = None
            raise error


def checksum(path: Path) -> dict[str, int | str]:
    """Number of bytes and xxh3_128, in hex, of a file."""
    digest = xxhash.xxh3_128()
    size = 0
    with regular(path).open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, on the host and contiguous; itself where it is so."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TypeError(
            f"a tensor of layout {tensor.layout} and {tensor.dtype} has no plain bytes"
        )
    if not tensor.is_meta and tensor.numel() and not _has_memory(tensor):
        raise TypeError("the tensor's memory was freed")
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    if plain.dtype != torch.bool or plain.is_meta:
        return plain
    # what nothing was written to may hold any byte for True, and a copy another one
    return plain.view(torch.uint8) != 0


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return False if memory was freed, as FSDP does: reading it would crash."""
    last = tensor.storage_offset() + sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    end = (last + 1) * tensor.element_size()
    return end <= tensor.untyped_storage().nbytes()


def _hash(plain: torch.Tensor) -> str:
    digest = xxhash.xxh3_128(f"{_name(plain.dtype)} {list(plain.shape)} ".encode())
    size = plain.numel() * plain.element_size()
    if size:  # Tensor.numpy() would fix the size of the program's own storage
        digest.update((ctypes.c_char * size).from_address(plain.data_ptr()))
    return digest.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class DamagedError(Exception):
    """The bytes of a tensor are not those that were written."""


class TensorFile:
    """A file of tensors, opened once; ``keys`` are what it holds."""

    def __init__(self, path: Path) -> None:
        file: Any = safe_open(regular(path), "pt")
        self._file = file
        self.keys = list(file.keys())
        self._described = json.loads((file.metadata() or {}).get(METADATA, "{}"))

    def read(self, key: str) -> torch.Tensor:
        """Return one tensor, mapped into memory.

        Raises ``DamagedError`` when its bytes are not those that were written.
        """
        tensor: torch.Tensor = self._file.get_tensor(key)
        described = self._described[key]
        if "dtype" in described:
            dtype = getattr(torch, described["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise DamagedError(f"this torch has no dtype {described['dtype']!r}")
            if tensor.data_ptr() % dtype.itemsize:
                # its place in memory does not suit the wider type: kernels that read two
                # numbers of complex128 at once end the process
                tensor = tensor.clone()
            tensor = tensor.view(dtype).reshape(described["shape"])
        if _hash(tensor) != described["xxh3_128"]:
            raise DamagedError(
                f"the bytes of tensor {key!r} are not those that were written"
            )
        return tensor
