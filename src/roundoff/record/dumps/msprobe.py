"""Dumps of msprobe (MindStudio Probe) 26.x as a Run.

They are ``step*/rank*|proc*/dump.json`` with ``dump_tensor_data/*.pt``. One row for
each tensor that a record of ``dump.json`` has, inputs and parameters too; the column
``role`` tells them apart. Names and statistics are translated in
:mod:`roundoff.record.dumps.msprobe_rows`.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import torch

from roundoff.errors import RunError
from roundoff.foreign import check_memory, regular
from roundoff.record.disk.checked_reading import damaged, read_checked, read_json
from roundoff.record.disk.description import RunDescription
from roundoff.record.disk.reader import Run
from roundoff.record.disk.schema import OPS, TensorRecord
from roundoff.record.disk.tensors import TensorFile
from roundoff.record.dumps.msprobe_rows import origins, parents, records

_DUMP = "dump.json"
_TENSORS = "dump_tensor_data"
_STEP = re.compile(r"step([0-9]{1,18})")
_RANK = re.compile(r"(rank|proc)([0-9]{1,9})")
_T = TypeVar("_T")
_LEVELS = {"L0": "module", "L1": "op"}


def find_dumps(path: Path) -> dict[tuple[int, int], Path]:
    """Return (rank, step) -> folder of each ``dump.json`` at, in, or one or two levels
    below ``path``; empty if there is none.

    ``proc<id>``, which msprobe writes without ``torch.distributed``, is rank 0. Raises
    ``RunError`` where two processes have written the same rank of the same step, and
    for a folder that cannot be listed.
    """
    if path.name == _DUMP and path.is_file():
        path = path.parent
    if (path / _DUMP).is_file():
        step = _step_number(path.absolute().parent.name)
        rank = _rank_number(path.absolute().name)
        return {(rank or 0, step or 0): path}
    if not path.is_dir():
        return {}
    dumps: dict[tuple[int, int], Path] = {}
    for step, folder in _step_folders(path):
        for rank, dump in _rank_folders(folder):
            if (rank, step) in dumps:
                raise _several_processes(folder, dumps[rank, step].name, dump.name)
            dumps[rank, step] = dump
    return dumps


def _step_folders(path: Path) -> list[tuple[int, Path]]:
    """Return the steps in a folder, or the folder itself if it is one step."""
    folders = []
    for name in sorted(read_checked(path, os.listdir, path)):
        number = _step_number(name)
        if number is not None:
            folders.append((number, path / name))
    number = _step_number(path.absolute().name)
    return [(number, path)] if number is not None and not folders else folders


def _rank_folders(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the ranks in the folder of a step."""
    if not folder.is_dir():
        return
    for name in sorted(read_checked(folder, os.listdir, folder)):
        rank = _rank_number(name)
        if rank is not None and (folder / name / _DUMP).is_file():
            yield rank, folder / name


def _step_number(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _rank_number(name: str) -> int | None:
    """Return the rank of ``rank<id>``, 0 for ``proc<id>``, None for any other name."""
    match = _RANK.fullmatch(name)
    if match is None:
        return None
    return int(match[2]) if match[1] == "rank" else 0


def _several_processes(folder: Path, first: str, second: str) -> RunError:
    return RunError(
        "several processes have written into one step, so it is not clear which is "
        "meant",
        where=str(folder),
        expected="one proc folder in each step, or rank folders",
        got=f"{first}, {second}",
        do="give one of these folders, or move the others away",
    )


def read_msprobe(
    path: str | os.PathLike[str], make_run: Callable[..., Run] | None = None
) -> Run:
    """Read a dump of msprobe: its ``dump_path``, one step or rank of it, or a
    ``dump.json``.

    ``make_run`` makes the run; it is :class:`MsprobeRun` if None. Raises ``RunError``
    when there is no dump, it holds no calls, or a file of it is damaged, which is
    named.
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
    heads: list[DumpHead] = []
    frames: list[pl.DataFrame] = []
    for (rank, step), folder in sorted(dumps.items()):
        head, frame = _read(folder, rank, step)
        heads.append(head)
        frames.append(frame)
    if not any(frame.height for frame in frames):
        raise RunError(
            "the dump is empty: msprobe has recorded no call",
            where=str(path),
            do="dump between debugger.start(model) and debugger.stop(); level L0 "
            "leaves out the root module",
        )
    return (make_run or MsprobeRun)(path, heads[0], dumps, pl.concat(frames))


@dataclass(frozen=True, slots=True)
class DumpHead:
    """What stands above the records of a dump.json."""

    task: str
    level: str


class MsprobeRun(Run):
    """A dump of msprobe, with the attributes and methods of
    :class:`roundoff.record.disk.reader.Run`.

    Tensors are loaded from ``.pt`` files without running any code that they may
    contain.
    """

    def __init__(
        self,
        path: Path,
        head: DumpHead,
        dumps: dict[tuple[int, int], Path],
        table: pl.DataFrame,
    ) -> None:
        steps_of: dict[int, list[int]] = {}
        for rank, step in sorted(dumps):
            steps_of.setdefault(rank, []).append(step)
        about = RunDescription(
            tool="msprobe",
            ranks=len(steps_of),
            level=_LEVELS.get(head.level, head.level),
            keep=_kept(head, table),
        )
        super().__init__(path, about, steps_of)
        self._head = head
        self._dumps = dumps
        self._table = table

    def __repr__(self) -> str:
        return (
            f"Run({self.location!r}, {len(self.steps)} steps, {len(self.ranks)} ranks, "
            f"of msprobe: {self._head.task}, {self._head.level})"
        )

    @cached_property
    def ops(self) -> pl.LazyFrame:
        """The rows of all ranks and steps, columns as in OPS; null where msprobe has
        nothing to say."""
        return self._table.lazy()

    def _part(self, rank: int | None, step: int | None) -> pl.LazyFrame:
        wanted = {"rank": rank, "step": step}
        return self._table.lazy().filter(
            **{name: value for name, value in wanted.items() if value is not None}
        )

    def verify(self) -> list[Path] | list[str]:
        """The tensor files that are missing or cannot be read; a damaged dump.json is
        an error when it is loaded."""
        broken: list[Path] = []
        has_tensor = pl.col("blob").is_not_null()
        kept = self._table.filter(has_tensor).select("rank", "step", "blob")
        for rank, step, blob in kept.unique(maintain_order=True).iter_rows():
            try:
                self.blob(rank, step, blob)
            except RunError:
                broken.append(self._dumps[rank, step] / _TENSORS / blob)
        return broken

    def blob(
        self,
        rank: int,
        step: int,
        key: str,
        opened: dict[Path, TensorFile] | None = None,
    ) -> torch.Tensor:
        """Return the tensor in one file of the dump."""
        del opened  # a file holds one tensor
        folder = self._dumps[rank, step] / _TENSORS
        path = folder / key
        if path.name != key:  # "../x.pt" would leave the dump
            raise damaged(folder, f"a tensor called {key!r}")
        tensor = read_checked(path, _load, self._present(path))
        rows = self._table.filter(rank=rank, step=step, blob=key)
        actual = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        for described in rows.select("dtype", "shape").iter_rows():
            if described != actual:
                raise RunError(
                    "the tensor in the file is not the one that the dump describes",
                    where=str(path),
                    expected="{} {}".format(*described),
                    got="{} {}".format(*actual),
                )
        return tensor


def _kept(head: DumpHead, table: pl.DataFrame) -> str:
    if head.task == "tensor":
        return "tensors"
    return "hash" if table["hash"].is_not_null().any() else "statistics"


def _load(path: Path) -> torch.Tensor:
    try:
        tensor = torch.load(regular(path), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RunError(
            "the file holds no plain tensor: it is damaged, or would need its own code "
            "to be run, which roundoff never does",
            where=str(path),
            expected="a tensor as msprobe writes it",
            got=str(error).partition("\n")[0][:200],
            do="make the dump again, or save the tensor without its subclass",
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise damaged(path, f"a {type(tensor).__name__} where a tensor should be")
    check_memory(tensor.nbytes, "the tensor")
    return tensor


def _read(folder: Path, rank: int, step: int) -> tuple[DumpHead, pl.DataFrame]:
    """The head of a dump.json, and the rows of its records."""
    path = folder / _DUMP
    content = read_checked(path, read_json, path)
    if not _is_dump(content):
        raise RunError(
            "not a dump of msprobe",
            where=str(path),
            expected='an object with "task", "level" and "data"',
        )
    origin_of = _read_optional(folder / "stack.json", origins)
    parent_of = _read_optional(folder / "construct.json", parents)
    rows = read_checked(
        path, records, content["data"], origin_of, parent_of, rank=rank, step=step
    )
    frame = read_checked(path, _frame, rows)
    return DumpHead(content["task"], content["level"]), frame


def _is_dump(content: Any) -> bool:
    if not isinstance(content, dict) or "data" not in content:
        return False
    return all(isinstance(content.get(name), str) for name in ("task", "level"))


def _read_optional(
    path: Path, parse: Callable[[dict[str, Any]], dict[str, _T]]
) -> dict[str, _T]:
    """Return ``parse`` of a file beside dump.json; empty where msprobe did not write it."""
    if not path.exists():
        return {}
    return read_checked(path, lambda: parse(read_json(path)))


def _frame(rows: Sequence[TensorRecord]) -> pl.DataFrame:
    columns = {name: [getattr(row, name) for row in rows] for name in OPS}
    return pl.DataFrame(columns, schema=OPS, strict=True)
