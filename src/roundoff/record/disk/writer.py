"""Writer: a recording that survives being killed and never stops the training."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import polars as pl
import torch

from roundoff.errors import warn
from roundoff.files import atomic_path
from roundoff.record.disk import scalars
from roundoff.record.disk.description import with_checksum
from roundoff.record.disk.folder import claim, publish
from roundoff.record.disk.mark import write_mark
from roundoff.record.disk.schema import (
    ABOUT,
    CHECKSUMS,
    LOOP,
    OPERATORS,
    SCALAR_FILE,
    SCHEMA,
    SET_UP,
    STEP_FILE,
    partial_name,
    rank_name,
)
from roundoff.record.disk.step_table import table_of
from roundoff.record.disk.tensors import Chunks, checksum
from roundoff.record.loop_events import LoopEvent
from roundoff.record.set_up import SetUp

_T = TypeVar("_T")


class Writer:
    """Writes one rank of a run, step by step.

    After the constructor nothing raises: a full disk, a vanished folder or a tensor
    that cannot be stored stops the recording with one ``RuntimeWarning``, and later
    calls do nothing. Steps finished before stay readable, also when the process is
    killed; a power failure may damage the last of them, which their checksums tell. Not
    for use from several threads at once.

    Args:
        path: folder of the run, made if missing.
        rank: of this process. Rank 0 writes ``run.json``.
        about: fields of ``run.json``. Every rank of a run gives the same ``"id"``, and
            ``"ranks"``, their number; a writer with the id of the run that is there
            joins it and keeps its steps. Values that JSON lacks are stored as their
            text.
        overwrite: delete a roundoff run that is there; other files never.

    Attributes:
        stopped: True once the recording has stopped.
        about: the object in ``run.json``.

    Raises ``OutputError`` when the folder holds another run (unless ``overwrite``) or
    other files, when it is a file, and when it cannot be written.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Writer(folder.name, about={"level": "op"}) as writer:
    ...     blob = writer.add(0, "0", torch.ones(2))
    ...     writer.write_step(0, {"record": [0], "operator": ["relu"], "blob": [blob]})
    ...     writer.scalar(0, "loss", 0.5)
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        about: Mapping[str, Any],
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self.stopped = False
        self.about: dict[str, Any] = {
            "version": metadata.version("roundoff"),
            "complete": False,
            "ranks": 1,
            "id": uuid.uuid4().hex,
            **_plain(about),
            "schema": SCHEMA,
        }
        claim(
            self.path,
            rank,
            about.get("id"),
            int(self.about["ranks"]),
            overwrite=overwrite,
        )
        self._folder = self.path / rank_name(rank)
        self._open: dict[int, Chunks] = {}
        self._closed = False
        scalars.repair(self._folder / SCALAR_FILE)
        scalars.repair(self._folder / STEP_FILE)
        if rank == 0:
            self._write_about()

    def add(self, step: int, key: str, tensor: torch.Tensor) -> str | None:
        """Store the tensor as it is now, any dtype, bit for bit, contiguous.

        Returns the key under which ``step`` has it: an earlier one if dtype, shape and
        bytes are the same, so nothing is stored twice in a step. None when the
        recording has stopped.
        """
        return self._guarded(lambda: self._chunks(step).add(key, tensor))

    def discard(self, step: int) -> None:
        """Drop the tensors of a step that was not finished."""
        self._guarded(lambda: self._chunks(step).discard())

    def write_step(
        self,
        step: int,
        rows: Mapping[str, Sequence[Any]] | pl.DataFrame,
        events: Sequence[LoopEvent] = (),
    ) -> None:
        """Finish a step: its rows and tensors appear on disk at once and whole.

        Columns of OPS that ``rows`` lacks become null, ``rank`` and ``step`` this
        writer's rank and this step. ``events`` are what the loop did. A step that is
        there already is replaced.
        """
        self._guarded(lambda: self._finish(step, rows, events))

    def scalar(self, step: int, name: str, value: float | torch.Tensor) -> None:
        """Record a number of this step: ``loss``, ``loss_scale``, ``grad_norm``, ``lr``.

        May be NaN or infinite.
        """
        self._guarded(
            lambda: scalars.append(self._folder / SCALAR_FILE, step, name, value)
        )

    def numbers(self, rows: Sequence[tuple[int, str, float]]) -> None:
        """Record numbers of steps of the program: step, name and value of each."""
        if rows:
            path = self._folder / STEP_FILE
            self._guarded(lambda: scalars.append_all(path, rows))

    def set_up(self, content: SetUp) -> None:
        """Record how the program was set up, in place of what was recorded of it."""
        self._guarded(lambda: self._write_set_up(content))

    def close(self, **about: Any) -> None:
        """End the run and write ``about`` over the fields of ``run.json``.

        ``complete`` is True unless it says otherwise. Tensors of steps that were not
        finished are dropped. Closing again does nothing.
        """
        self._guarded(lambda: self._close(about))
        self._closed = True

    def fail(self) -> None:
        """Say in ``run.json`` of a closed run that its recording failed.

        The next run into the folder may replace it.
        """
        self.about["failed"] = True
        if self.rank == 0 and not self.stopped:
            self._write_about()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(complete=kind is None)

    def _guarded(self, work: Callable[[], _T]) -> _T | None:
        """Return ``work()``; whatever it raises stops the recording."""
        if self.stopped or self._closed:
            return None
        try:
            return work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - training goes on; polars panics
            self._stop(error)
            return None

    def _stop(self, error: BaseException) -> None:
        self.stopped = True
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}"
        text = (
            f"{self.path}: the recording has stopped and training goes on; "
            f"its whole steps are readable: {reason}"
        )
        self._abandon()
        self.about["stopped"] = reason
        try:
            if self.rank == 0:
                self._write_about()
        except Exception:  # noqa: BLE001 - the same fault again: it is being reported
            pass
        warn(text)

    def _chunks(self, step: int) -> Chunks:
        if step < 0:
            raise ValueError(f"steps count from 0: {step}")
        if step not in self._open:
            folder = self._folder / partial_name(step)
            if folder.exists():  # of a step that was given up
                shutil.rmtree(folder)
            folder.mkdir()
            self._open[step] = Chunks(folder)
        return self._open[step]

    def _finish(
        self,
        step: int,
        rows: Mapping[str, Sequence[Any]] | pl.DataFrame,
        events: Sequence[LoopEvent],
    ) -> None:
        table = table_of(rows, self.rank, step)
        chunks = self._chunks(step)
        folder = chunks.folder
        path = folder / OPERATORS
        table.write_parquet(path, compression="zstd", statistics=False)
        chunks.finish()
        loop = folder / LOOP
        text = json.dumps([asdict(event) for event in events])
        loop.write_text(text, encoding="utf-8")
        sums = {
            OPERATORS: checksum(path),
            LOOP: checksum(loop),
            **chunks.checksums,
        }
        (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
        write_mark(folder)
        publish(folder, step)
        del self._open[step]

    def _close(self, about: dict[str, Any]) -> None:
        self._abandon()
        self.about |= {"complete": True, **_plain(about), "schema": SCHEMA}
        if self.rank == 0:
            self._write_about()

    def _abandon(self) -> None:
        for chunks in self._open.values():
            chunks.abandon()
            shutil.rmtree(chunks.folder, ignore_errors=True)
        self._open = {}

    def _write_set_up(self, content: SetUp) -> None:
        with atomic_path(self._folder / SET_UP) as temporary:
            text = json.dumps(with_checksum(_plain(asdict(content))))
            temporary.write_text(text, encoding="utf-8")

    def _write_about(self) -> None:
        with atomic_path(self.path / ABOUT) as temporary:
            text = json.dumps(with_checksum(self.about), indent=1)
            temporary.write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return the value as JSON has it: keys, and whatever JSON lacks, as their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value)
