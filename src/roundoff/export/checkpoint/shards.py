"""Tensors of a model in a folder: one safetensors file, or several with an index, as Hugging Face has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.files import atomic_path, write_text

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_tensors(
    tensors: Mapping[str, Tensor], folder: Path, limit: int = 5 * 10**9
) -> list[Path]:
    """Write all tensors, in files of at most ``limit`` bytes (one larger tensor has a file of its own).

    Files that an earlier model left under these names are removed, since readers would prefer or mix them.
    """
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        own = tensor.numel() * tensor.element_size()
        if parts[-1] and size + own > limit:
            parts.append({})
            size = 0
        parts[-1][name] = tensor.detach().contiguous()
        size += own
    count = len(parts)
    names = (
        [FILE]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    for name, part in zip(names, parts, strict=True):
        with atomic_path(folder / name) as temporary:
            save_file(_apart(part), temporary, metadata={"format": "pt"})
    for old in (
        *folder.glob("model-*-of-*.safetensors"),
        folder / FILE,
        folder / INDEX,
    ):
        if old.name not in names:
            old.unlink(missing_ok=True)
    if count > 1:
        where = {
            tensor: name
            for name, part in zip(names, parts, strict=True)
            for tensor in part
        }
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        write_text(
            folder / INDEX,
            json.dumps(
                {"metadata": {"total_size": total}, "weight_map": where}, indent=2
            )
            + "\n",
        )
    return [folder / name for name in names]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder, on the CPU. Raises ``QuantizationError`` where a file is missing or damaged."""
    names = [FILE]
    try:
        if (folder / INDEX).exists():
            names = sorted(
                set(
                    json.loads((folder / INDEX).read_text(encoding="utf-8"))[
                        "weight_map"
                    ].values()
                )
            )
        found: dict[str, Tensor] = {}
        for name in names:
            with safe_open(folder / name, framework="pt") as file:
                found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise QuantizationError(
            f"not a readable model: {error}",
            where=str(folder),
            expected=f"{FILE}, or {INDEX} and the files it names",
        ) from error
    return found


def _apart(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory (tied weights) each with their own, which safetensors asks for."""
    seen: set[int] = set()
    found = {}
    for name, tensor in part.items():
        at = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if at in seen and at else tensor
        seen.add(at)
    return found
