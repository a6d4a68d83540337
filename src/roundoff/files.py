"""Write a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roundoff.errors import OutputError


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path``, renamed to it when the block ends and removed when it raises.

    The folder is made if missing. Raises ``OutputError`` when the folder cannot be made or written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_path(Path(folder) / "a.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     (Path(folder) / "a.txt").read_text()
    'whole'
    """
    path = Path(path)
    check_folder(path.parent)
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix
        )
        os.close(descriptor)
        temporary = Path(name)
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_folder(folder: str | Path) -> Path:
    """The folder, made if missing, proven writable before hours of work are spent.

    Raises ``OutputError`` when it is read-only, or a file stands in its place.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return folder


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(
        "cannot write here",
        where=str(path),
        expected="a folder that this user may write to",
        got=f"{type(error).__name__}: {error.strerror or error}",
        do="choose another place with -o",
    )
