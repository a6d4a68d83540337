"""Write a file whole or not at all, here or at a URL."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roundoff.errors import OutputError, wrong_type

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:::[^/]+)?://")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, renamed to it at the end and removed on an exception.

    The folder is made if missing. Raises ``OutputError`` when the folder cannot be made
    or written to.

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
    """Make the folder if it is missing, and prove it writable before hours of work are spent.

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


@contextmanager
def open_output(place: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an :func:`atomic_path`; for a URL that fsspec knows, one whose file is sent at the end.

    Nothing is sent when the block raises. Raises ``OutputError`` naming the URL,
    without what is secret in it, when its protocol is unknown or the file cannot be
    sent.
    """
    if not is_url(place):
        with atomic_path(local_path(place)) as temporary:
            yield temporary
        return
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / ("output" + Path(masked(place)).suffix)
        yield temporary
        try:
            import fsspec

            with (
                fsspec.open(os.fspath(place), "wb") as out,
                temporary.open("rb") as file,
            ):
                shutil.copyfileobj(file, out, 2**20)
        except Exception as error:  # noqa: BLE001 - whatever the library of the protocol raises
            # its cause may show the URL with its secrets
            raise OutputError(
                "cannot write here",
                where=masked(place),
                got=masked(f"{type(error).__name__}: {error}"),
                do="check address and access, or choose another place with -o",
            ) from None


def write_text(place: str | os.PathLike[str], text: str) -> None:
    """Write a text, in UTF-8, to a file or a URL; errors as of :func:`open_output`.

    >>> write_text("memory://reports/a.txt", "read")
    >>> import fsspec
    >>> fsspec.open("memory://reports/a.txt").open().read()
    b'read'
    """
    with open_output(place) as temporary:
        temporary.write_text(text, encoding="utf-8")


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return True for the address of something that is no file of this machine.

    >>> is_url("s3://bucket/run"), is_url("file:///runs/a"), is_url("runs/a"), is_url(Path("s3://bucket/run"))
    (True, False, False, False)
    """
    match = _URL.match(place) if isinstance(place, str) else None
    return match is not None and match[1] not in ("file", "local")


def as_path(place: object, name: str, expected: str = "a path") -> Path:
    """Return the path that an argument of this name is.

    Raises ``ArgumentError`` for anything but a text or a path.
    """
    if isinstance(place, str | os.PathLike):
        return Path(place)
    raise wrong_type(name, place, expected)


def local_path(place: str | os.PathLike[str]) -> Path:
    """Return the path that a local URL or a path means.

    >>> local_path("file:///runs/a"), local_path("runs/a") == Path("runs/a")
    (...Path('/runs/a'), True)
    """
    text = os.fspath(as_path(place, "path")) if not isinstance(place, str) else place
    return Path(text[text.index("//") + 2 :] if _URL.match(text) else text)


def masked(url: str | os.PathLike[str]) -> str:
    """Mask what may be secret in the URLs of a text: user and password, and the values after ``?``.

    >>> masked("ftp://me:secret@host/run?token=abc&x=1")
    'ftp://***@host/run?token=***&x=***'
    """
    without_user = re.sub(r"://[^/\s]*@", "://***@", os.fspath(url))
    return re.sub(r"([?&][^=&\s]+=)[^&\s'\"]*", r"\1***", without_user)


def toml_value(value: Any) -> str:
    """Write strings, numbers, booleans, lists and mappings as a TOML value that reads back exactly.

    Mappings are inline tables. TOML has no null: what a mapping holds as ``None`` is
    left out; anywhere else it raises ``TypeError``.

    >>> toml_value({"a": [1, 0.1, True], "b c": float("inf")})
    '{ "a" = [1, 0.1, true], "b c" = inf }'
    """
    if isinstance(value, Mapping):
        present = {key: item for key, item in value.items() if item is not None}
        items = [f"{toml_string(str(k))} = {toml_value(v)}" for k, v in present.items()]
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return float.__repr__(value)  # inf and nan are TOML's own words
    if value is None:
        raise TypeError("TOML has no null")
    return toml_string(value)  # JSON writes all other values the same way


def toml_string(value: Any) -> str:
    """Write a string as JSON does; TOML allows no bare delete character, and no surrogates."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(
        "cannot write here",
        where=str(path),
        expected="a folder that this user may write to",
        got=f"{type(error).__name__}: {error.strerror or error}",
        do="choose another place with -o",
    )
