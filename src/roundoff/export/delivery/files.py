"""The files of a delivery: a folder that is new or replaced whole, a reason for each gap."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from roundoff.errors import OutputError, RoundoffError
from roundoff.export.delivery.records import FileRow
from roundoff.unforeseen import note, save_report, unforeseen_message

T = TypeVar("T")

#: File -> what it is.
FILES = {
    "model.onnx": "integer codes and Q/DQ: what is deployed",
    "fake_quant.onnx": "the same arithmetic in floating point",
    "fp32.onnx": "the unquantized model, to compare with",
    "model.pt": "the simulation in PyTorch: roundoff.export.load_model",
    "plan.toml": "which site runs in which format",
    "record.toml": "every scale and zero point",
    "record.txt": "the same in AMCT's format",
    "report.html": "this report as a page",
    "summary.json": "this report as data",
}
#: Written where it is asked for.
CHECKPOINT = {"checkpoint": "weights as codes and scales, for compressed-tensors"}


class Folder:
    """Write files into a folder, and remember why some could not be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reasons: dict[str, str] = {}

    def write(self, name: str, writer: Callable[[Path], T]) -> T | None:
        """Call ``writer`` with the path of a file; its error becomes the reason.

        Returns what it returned, None where it raised: a ``RoundoffError``, for a
        library that is missing, or what nobody foresaw; then the reason names a file
        with the traceback. Raises ``OutputError`` for an ``OSError``: no other file
        could be written either.
        """
        try:
            return writer(self.path / name)
        except RoundoffError as error:
            # what a library or the model's code raised stands in ``got``
            self.reasons[name] = ": ".join(filter(None, (error.what, error.got)))
        except ModuleNotFoundError as error:
            self.reasons[name] = f"{error}: pip install 'roundoff[onnx]'"
        except OSError as error:
            raise OutputError(
                "cannot write this file",
                where=name,
                got=f"{type(error).__name__}: {error.strerror or error}",
                do="make room, or choose another folder with -o",
            ) from error
        except Exception as error:  # noqa: BLE001 - exporters raise anything, and the other files are good
            note(error, f"write {name}")
            self.reasons[name] = unforeseen_message(error, save_report(error))
        return None

    def withdraw(self, name: str, reason: str) -> None:
        """Remove a file, if it was written; ``reason`` stands unless there is one."""
        (self.path / name).unlink(missing_ok=True)
        self.reasons.setdefault(name, reason)

    def rows(self, *, checkpoint: bool = False) -> tuple[FileRow, ...]:
        """Return a row for each file that was promised."""
        promised = FILES | CHECKPOINT if checkpoint else FILES
        return tuple(
            FileRow(name, what, _bytes(self.path / name), self.reasons.get(name, ""))
            for name, what in promised.items()
        )


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Folder]:
    """Give a folder that takes the place of ``folder`` when everything in it is written."""
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}."
    ) as temporary:
        # a folder within it, so that the mode is the usual one
        work = Path(temporary) / "files"
        work.mkdir()
        yield Folder(work)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(work, folder)


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise ``OutputError`` unless the folder may be written."""
    names = _names_in(folder)
    if names is None:
        raise OutputError(
            "a file is where the folder should go",
            where=str(folder),
            do="choose another place with -o",
        )
    strangers = [name for name in names if name not in FILES | CHECKPOINT]
    if names and not overwrite:
        raise OutputError(
            "the folder is not empty",
            where=str(folder),
            got=", ".join(names[:5]),
            expected="a new or empty folder",
            do="choose another with -o, or say that it may be replaced: --overwrite",
        )
    if strangers:
        raise OutputError(
            "roundoff quantize has not written this, so the folder is not replaced",
            where=str(folder),
            got=", ".join(strangers[:5]),
            do="choose another folder with -o",
        )


def _names_in(folder: Path) -> list[str] | None:
    """List what a folder holds; None for a file. Check that its parent can be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        names: list[str] | None = []
        if folder.is_dir():
            names = sorted(path.name for path in folder.iterdir())
        elif folder.exists():
            names = None
        with tempfile.TemporaryFile(dir=folder.parent):
            pass
    except OSError as error:
        raise OutputError(
            "cannot write here",
            where=str(folder),
            got=f"{type(error).__name__}: {error}",
            do="choose another folder with -o",
        ) from error
    return names


def _bytes(path: Path) -> int | None:
    """Return the size of a file, or of all files in a folder; None where there is none."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size if path.exists() else None
