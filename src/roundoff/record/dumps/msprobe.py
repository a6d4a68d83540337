"""Dumps of msprobe (MindStudio Probe) 26.x as a Run: ``step*/rank*|proc*/dump.json`` with ``dump_tensor_data/*.pt``.

One row for each tensor that a record of ``dump.json`` has, inputs and parameters too; the column ``role`` tells them apart.
What msprobe's names and statistics become stands in :mod:`roundoff.record.dumps.msprobe_rows`.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import torch

from roundoff.errors import RunError
from roundoff.record.disk.checked import damaged, read_json, reading
from roundoff.record.disk.reader import Run
from roundoff.record.disk.schema import OPS
from roundoff.record.disk.tensors import TensorFile
from roundoff.record.dumps.msprobe_rows import parents, rows, sources

_DUMP, _TENSORS = "dump.json", "dump_tensor_data"
_STEP = re.compile(r"step([0-9]{1,18})")
_RANK = re.compile(r"(rank|proc)([0-9]{1,9})")
_T = TypeVar("_T")
_LEVELS = {"L0": "module", "L1": "op"}


def find_dumps(path: Path) -> dict[tuple[int, int], Path]:
    """(rank, step) -> folder of each ``dump.json`` at, in, or one or two levels below ``path``; empty if there is none.

    ``proc<id>``, which msprobe writes without ``torch.distributed``, is rank 0. Raises ``RunError`` where two processes
    have written the same rank of the same step, and for a folder that cannot be listed.
    """
    if path.name == _DUMP and path.is_file():
        path = path.parent
    if (path / _DUMP).is_file():
        step = _STEP.fullmatch(path.absolute().parent.name)
        rank = _RANK.fullmatch(path.absolute().name)
        number = int(rank[2]) if rank and rank[1] == "rank" else 0
        return {(number, int(step[1]) if step else 0): path}
    if not path.is_dir():
        return {}
    found: dict[tuple[int, int], Path] = {}
    own = _STEP.fullmatch(path.absolute().name)
    names = sorted(reading(path, os.listdir, path))
    steps = [
        (int(match[1]), path / name)
        for name in names
        if (match := _STEP.fullmatch(name))
    ]
    for step_number, folder in [(int(own[1]), path)] if own and not steps else steps:
        for name in (
            sorted(reading(folder, os.listdir, folder)) if folder.is_dir() else []
        ):
            match = _RANK.fullmatch(name)
            if match is None or not (folder / name / _DUMP).is_file():
                continue
            key = (int(match[2]) if match[1] == "rank" else 0, step_number)
            if key in found:
                raise RunError(
                    "several processes have written into one step, so it is not clear which is meant",
                    where=str(folder),
                    expected="one proc folder in each step, or rank folders",
                    got=f"{found[key].name}, {name}",
                    do="give one of these folders, or move the others away",
                )
            found[key] = folder / name
    return found


def read_msprobe(
    path: str | os.PathLike[str], kind: Callable[..., Run] | None = None
) -> Run:
    """The run in a dump of msprobe: its ``dump_path``, one step or rank of it, or a ``dump.json``.

    ``kind`` makes it, :class:`MsprobeRun` unless another is given.

    Raises ``RunError`` when there is none, it holds no calls, or a file of it is damaged, which is named.
    """
    path = Path(path)
    dumps = find_dumps(path)
    if not dumps:
        raise RunError(
            "no dump of msprobe here",
            where=str(path),
            expected="step*/rank*/dump.json or step*/proc*/dump.json",
            do="give the folder that was msprobe's dump_path",
        )
    heads: list[dict[str, Any]] = []
    frames: list[pl.DataFrame] = []
    for (rank, step), folder in sorted(dumps.items()):
        head, frame = _read(folder, rank, step)
        heads.append(head)
        frames.append(frame)
    if not any(frame.height for frame in frames):
        raise RunError(
            "the dump is empty: msprobe has recorded no call",
            where=str(path),
            do="dump between debugger.start(model) and debugger.stop(); level L0 leaves out the root module",
        )
    return (kind or MsprobeRun)(path, heads[0], dumps, pl.concat(frames))


class MsprobeRun(Run):
    """A dump of msprobe, with the attributes and methods of :class:`roundoff.record.disk.reader.Run`.

    Tensors are loaded from ``.pt`` files without running any code that they may contain.
    """

    def __init__(
        self,
        path: Path,
        head: dict[str, Any],
        dumps: dict[tuple[int, int], Path],
        table: pl.DataFrame,
    ) -> None:
        ranks = sorted({rank for rank, _ in dumps})
        found = {rank: sorted(step for r, step in dumps if r == rank) for rank in ranks}
        kept = "tensors" if head.get("task") == "tensor" else None
        about = {
            "tool": "msprobe",
            "ranks": len(ranks),
            "level": _LEVELS.get(head["level"], head["level"]),
            "keep": kept
            or ("hash" if table["hash"].is_not_null().any() else "statistics"),
            "msprobe": head,
        }
        super().__init__(path, about, found)
        self._dumps = dumps
        self._table = table

    def __repr__(self) -> str:
        head = self.about["msprobe"]
        return (
            f"Run({self.location!r}, {len(self.steps)} steps, {len(self.ranks)} ranks, "
            f"of msprobe: {head['task']}, {head['level']})"
        )

    @cached_property
    def ops(self) -> pl.LazyFrame:
        """The rows of all ranks and steps, columns as in OPS; null where msprobe has nothing to say."""
        return self._table.lazy()

    def _part(self, rank: int | None, step: int | None) -> pl.LazyFrame:
        wanted = {"rank": rank, "step": step}
        return self._table.lazy().filter(
            **{name: value for name, value in wanted.items() if value is not None}
        )

    def verify(self) -> list[Path] | list[str]:
        """The tensor files that are missing or cannot be read; a damaged dump.json is an error when it is loaded."""
        found: list[Path] = []
        kept = self._table.filter(pl.col("blob").is_not_null()).select(
            "rank", "step", "blob"
        )
        for rank, step, blob in kept.unique(maintain_order=True).iter_rows():
            try:
                self.blob(rank, step, blob)
            except RunError:
                found.append(self._dumps[rank, step] / _TENSORS / blob)
        return found

    def blob(
        self,
        rank: int,
        step: int,
        key: str,
        opened: dict[Path, TensorFile] | None = None,
    ) -> torch.Tensor:
        """The tensor in one file of the dump."""
        del opened  # a file holds one tensor
        folder = self._dumps[rank, step] / _TENSORS
        path = folder / key
        if path.name != key:  # "../x.pt" would leave the dump
            raise damaged(folder, f"a tensor called {key!r}")
        tensor = reading(path, _load, self._present(path))
        rows = self._table.filter(rank=rank, step=step, blob=key)
        found = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        said = [
            row for row in rows.select("dtype", "shape").iter_rows() if row != found
        ]
        if said:
            raise RunError(
                "the tensor in the file is not the one that the dump describes",
                where=str(path),
                expected="{} {}".format(*said[0]),
                got="{} {}".format(*found),
            )
        return tensor


def _load(path: Path) -> torch.Tensor:
    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RunError(
            "the file holds no plain tensor: it is damaged, or would need its own code to be run, which roundoff never does",
            where=str(path),
            expected="a tensor as msprobe writes it",
            got=str(error).partition("\n")[0][:200],
            do="make the dump again, or save the tensor without its subclass",
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise damaged(path, f"a {type(tensor).__name__} where a tensor should be")
    return tensor


def _read(folder: Path, rank: int, step: int) -> tuple[dict[str, Any], pl.DataFrame]:
    """What stands above the records of a dump.json, and the rows of its records."""
    path = folder / _DUMP
    content = reading(path, read_json, path)
    if (
        not isinstance(content, dict)
        or "data" not in content
        or not all(isinstance(content.get(name), str) for name in ("task", "level"))
    ):
        raise RunError(
            "not a dump of msprobe",
            where=str(path),
            expected='an object with "task", "level" and "data"',
        )
    source = _beside(folder / "stack.json", sources)
    parent = _beside(folder / "construct.json", parents)
    columns = reading(path, rows, content["data"], source, parent)
    count = len(columns["record"])
    columns |= {"rank": [rank] * count, "step": [step] * count}
    frame = reading(path, _frame, columns)
    head = {
        name: content.get(name)
        for name in ("task", "level", "framework", "dump_data_dir")
    }
    return {
        name: str(value) for name, value in head.items() if value is not None
    }, frame


def _beside(
    path: Path, read: Callable[[dict[str, Any]], dict[str, _T]]
) -> dict[str, _T]:
    """What ``read`` makes of a file beside dump.json; empty where msprobe was told to leave it out."""
    return reading(path, lambda: read(read_json(path))) if path.exists() else {}


def _frame(columns: dict[str, list[Any]]) -> pl.DataFrame:
    count = len(columns["record"])
    return pl.DataFrame(
        {name: columns.get(name, [None] * count) for name in OPS},
        schema=OPS,
        strict=True,
    )
