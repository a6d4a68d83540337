"""Tensors of a model in a folder, as Hugging Face stores them.

That is one safetensors file, or several with an index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.files import atomic_path, write_text
from roundoff.foreign import check_memory, inside, parse_json, read_text, regular

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_tensors(
    tensors: Mapping[str, Tensor], folder: Path, limit: int = 5 * 10**9
) -> list[Path]:
    """Write all tensors, in files of at most ``limit`` bytes; return the files.

    One larger tensor has a file to itself. Files that an earlier model left under these
    names are removed, since readers would prefer or mix them.
    """
    parts = _parts(tensors, limit)
    names = _file_names(len(parts))
    for name, part in zip(names, parts, strict=True):
        with atomic_path(folder / name) as temporary:
            save_file(_without_sharing(part), temporary, metadata={"format": "pt"})
    _remove_others(folder, names)
    if len(parts) > 1:
        _write_index(folder, names, parts)
    return [folder / name for name in names]


def _parts(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Divide tensors into files; none gives one empty file."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        tensor_bytes = _bytes(tensor)
        if parts[-1] and size + tensor_bytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = tensor.detach().contiguous()
        size += tensor_bytes
    return parts


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [FILE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _remove_others(folder: Path, names: Sequence[str]) -> None:
    shards = folder.glob("model-*-of-*.safetensors")
    for old in (*shards, folder / FILE, folder / INDEX):
        if old.name not in names:
            old.unlink(missing_ok=True)


def _write_index(
    folder: Path, names: Sequence[str], parts: Sequence[Mapping[str, Tensor]]
) -> None:
    files: dict[str, str] = {}
    total = 0
    for name, part in zip(names, parts, strict=True):
        files |= dict.fromkeys(part, name)
        total += sum(_bytes(tensor) for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder, on the CPU.

    Raises:
        QuantizationError: a file is missing or damaged, or all need more memory than
            there is.
    """
    tensors: dict[str, Tensor] = {}
    try:
        names = _named_files(folder)
        sizes = (regular(folder / name).stat().st_size for name in names)
        check_memory(sum(sizes), "this checkpoint")
        for name in names:
            with safe_open(regular(folder / name), framework="pt") as file:
                keys = file.keys()
                tensors |= {key: file.get_tensor(key) for key in keys}
    except (
        OSError,
        MemoryError,
        RuntimeError,  # larger than what can be mapped
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise QuantizationError(
            f"not a readable model: {error}",
            where=str(folder),
            expected=f"{FILE}, or {INDEX} and the files it names",
        ) from error
    return tensors


def _named_files(folder: Path) -> list[str]:
    """Return the files of the index; the one file where there is no index."""
    index = folder / INDEX
    if not index.exists():
        return [FILE]
    files = parse_json(read_text(index))["weight_map"]
    names = sorted({str(name) for name in files.values()})
    for name in names:
        if inside(folder, name) is None:
            raise ValueError(f"{INDEX} names a file elsewhere: {name!r}")
    return names


def _without_sharing(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory (tied weights): safetensors takes no shared ones."""
    addresses: set[int] = set()
    separate = {}
    for name, tensor in part.items():
        address = tensor.untyped_storage().data_ptr()
        is_shared = address in addresses and address != 0
        separate[name] = tensor.clone() if is_shared else tensor
        addresses.add(address)
    return separate
