"""Take a folder for a run: what is refused, cleaned up, and never deleted."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roundoff.errors import OutputError
from roundoff.files import check_folder
from roundoff.foreign import parse_json, read_text
from roundoff.record.disk.schema import (
    ABOUT,
    CHECKSUMS,
    LOOP,
    MARK,
    OPERATORS,
    RANK_FILES,
    SET_UP,
    is_chunk,
    parse_rank,
    parse_step,
    rank_name,
    step_name,
)

# What a killed writer may leave: temporary files of files.atomic_path, steps that were
# not finished, and steps that were just being replaced.
_TEMPORARY = re.compile(rf"\.({re.escape(ABOUT)}|{re.escape(SET_UP)})\..+")
_UNFINISHED = re.compile(r"\.(step[0-9]{6,18})\.(partial|replaced)")


def claim(
    path: Path, rank: int, identity: str | None, ranks: int, *, overwrite: bool
) -> None:
    """Make ``path`` ready for ``rank`` to write into, or raise ``OutputError`` and
    change nothing.

    A run that is there already is refused, unless it has the same identity (then this
    rank joins it, and its steps so far stay), its recording failed, or ``overwrite`` is
    true: then rank 0
    deletes ``run.json`` and the folders of ranks from ``ranks`` on, and each rank its
    own folder, so that ranks that start at different times don't delete each other's.
    Only files with the names that a writer gives them are deleted.
    """
    try:
        _claim(path, rank, identity, ranks, overwrite=overwrite)
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise OutputError(
            "cannot write here, or clean up what an earlier run left",
            where=str(path),
            expected="a folder that this user may write to",
            got=f"{type(error).__name__}: {error.strerror or error}",
            do="choose another place with -o",
        ) from error


def _claim(
    path: Path, rank: int, identity: str | None, ranks: int, *, overwrite: bool
) -> None:
    if path.exists() and not path.is_dir():
        raise OutputError(
            "a file is where the run should go",
            where=str(path),
            expected="a folder, or a name that is still free",
            do="choose another place with -o",
        )
    path.mkdir(parents=True, exist_ok=True)
    overwrite = overwrite or has_failed(path)
    joins = _may_join(path, rank, identity, overwrite=overwrite)
    doomed = _doomed_folders(path, rank, ranks) if overwrite else []
    rank_folder = path / rank_name(rank)
    for folder in {rank_folder, *doomed}:
        _refuse_strangers(folder)
    if overwrite and rank == 0:
        (path / ABOUT).unlink(missing_ok=True)
    for folder in filter(Path.exists, doomed):
        shutil.rmtree(folder)
    # if several processes take themselves for rank 0, only one makes the folder
    rank_folder.mkdir(exist_ok=joins)
    check_folder(rank_folder)
    _clean(rank_folder)
    if rank == 0:
        _remove_temporary(path)


def _remove_temporary(folder: Path) -> None:
    for file in folder.iterdir():
        if _TEMPORARY.fullmatch(file.name):
            file.unlink(missing_ok=True)


def _may_join(path: Path, rank: int, identity: str | None, *, overwrite: bool) -> bool:
    """Return True if this rank is of the run that is in the folder.

    Raises ``OutputError`` where another run, or a stranger's file, is in the way.
    """
    present = _read_about(path)
    if present is None:
        _refuse_foreign(path)
        # another rank may have begun the run in between
        present = _read_about(path)
    if present is None:
        # a run that was killed while it began, or is beginning, has the folder alone
        is_taken = (path / rank_name(rank)).exists()
    else:
        is_taken = identity is None or str(present.get("id")) != str(identity)
    if is_taken and not overwrite:
        raise _taken(path)
    return present is not None and not is_taken


def has_failed(path: Path) -> bool:
    """Return True where the run in the folder says that its recording failed or stopped.

    Such a run may be replaced without being asked.
    """
    present = _read_about(path) or {}
    return present.get("failed") is True or bool(present.get("stopped"))


def _doomed_folders(path: Path, rank: int, ranks: int) -> list[Path]:
    """Return what this rank deletes when it overwrites a run."""
    doomed = [path / rank_name(rank)]
    if rank != 0:
        return doomed
    for folder in sorted(path.iterdir()):
        number = parse_rank(folder.name)
        if number is not None and number >= ranks and folder not in doomed:
            doomed.append(folder)
    return doomed


def _taken(path: Path) -> OutputError:
    return OutputError(
        "there is a run here already",
        where=str(path),
        expected="an empty folder; for several processes of one run, a rank for each "
        "and the same id",
        do="choose another place with -o, or say that it may be deleted: --overwrite "
        "(overwrite=True)",
    )


def _read_about(path: Path) -> dict[str, Any] | None:
    """Return the object in run.json, None where there is no such file."""
    file = path / ABOUT
    if not os.path.lexists(file):
        return None
    try:
        about = parse_json(read_text(file))
    except (OSError, ValueError):
        about = None
    if not isinstance(about, dict) or type(about.get("schema")) is not int:
        raise OutputError(
            "this file is not of a roundoff run, so it is not replaced",
            where=str(file),
            expected='an object with "schema": 1',
            do="choose another place with -o, or delete the file yourself",
        )
    return about


def _refuse_foreign(path: Path) -> None:
    """Refuse a folder without run.json in which not all is what other ranks have left."""
    for file in sorted(path.iterdir()):
        is_ours = file.name == ABOUT or parse_rank(file.name) is not None
        if not is_ours and not _TEMPORARY.fullmatch(file.name):
            raise OutputError(
                "the folder is not empty and holds no run, so nothing is written or "
                "deleted here",
                where=str(path),
                expected="an empty folder, or one that is not there yet",
                got=f"a folder with {file.name!r} in it",
                do="choose another place with -o",
            )


def _refuse_strangers(folder: Path) -> None:
    for stranger in _strangers(folder):
        raise OutputError(
            "roundoff has not written this, so the folder around it is not deleted",
            where=str(stranger),
            do="move it away, or choose another place with -o",
        )


def _strangers(folder: Path) -> Iterator[Path]:
    """Yield what is in a rank's folder, or is it, and does not look like a writer's."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        yield folder
        return
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink():
            yield entry
        elif entry.is_dir():
            yield from _strange_folders(entry)
        elif entry.name not in RANK_FILES and not _TEMPORARY.fullmatch(entry.name):
            yield entry


def _strange_folders(folder: Path) -> Iterator[Path]:
    """Yield the files in a step's folder that are not a writer's; any other folder itself."""
    if parse_step(folder.name) is None:
        if not _UNFINISHED.fullmatch(folder.name):
            yield folder
        return
    for file in sorted(folder.iterdir()):
        is_named = file.name in (OPERATORS, CHECKSUMS, LOOP, MARK)
        is_written = is_named or is_chunk(file.name)
        if file.is_symlink() or not is_written:
            yield file


def _clean(folder: Path) -> None:
    """Remove what a killed writer left in a rank's folder; a step that it was replacing
    gets its name back."""
    for entry in sorted(folder.iterdir()):
        match = _UNFINISHED.fullmatch(entry.name)
        if match and match[2] == "replaced" and not (folder / match[1]).exists():
            entry.rename(folder / match[1])
        elif match:
            shutil.rmtree(entry)
        elif _TEMPORARY.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def publish(partial: Path, step: int) -> None:
    """Give a finished step its name. A step of that name is replaced."""
    target = partial.parent / step_name(step)
    aside = partial.parent / f".{step_name(step)}.replaced"
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    partial.rename(target)
    if aside.exists():
        shutil.rmtree(aside, ignore_errors=True)
