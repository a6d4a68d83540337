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

from roundoff.errors import OutputError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:::[^/]+)?://")


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


@contextmanager
def open_output(place: str | os.PathLike[str]) -> Iterator[Path]:
    """:func:`atomic_path`, also for a URL that fsspec knows, where the file goes when the block ends.

    Nothing is sent when the block raises. Raises ``OutputError`` naming the URL, without what is secret in it, when its
    protocol is unknown or the file cannot be sent.
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
    """Whether this names something that is not a file of this machine: ``s3://bucket/run``, not ``file:///runs/a``.

    >>> is_url("s3://bucket/run"), is_url("file:///runs/a"), is_url("runs/a"), is_url(Path("s3://bucket/run"))
    (True, False, False, False)
    """
    match = _URL.match(place) if isinstance(place, str) else None
    return match is not None and match[1] not in ("file", "local")


def local_path(place: str | os.PathLike[str]) -> Path:
    """The path that a local URL or a path means.

    >>> local_path("file:///runs/a"), local_path("runs/a") == Path("runs/a")
    (...Path('/runs/a'), True)
    """
    text = os.fspath(place)
    return Path(text[text.index("//") + 2 :] if _URL.match(text) else text)


def masked(url: str | os.PathLike[str]) -> str:
    """The text without what may be secret in URLs in it: user and password, and the values after ``?``.

    >>> masked("ftp://me:secret@host/run?token=abc&x=1")
    'ftp://***@host/run?token=***&x=***'
    """
    return re.sub(
        r"([?&][^=&\s]+=)[^&\s'\"]*",
        r"\1***",
        re.sub(r"://[^/\s]*@", "://***@", os.fspath(url)),
    )


def toml_value(value: Any) -> str:
    """A TOML value of strings, numbers, booleans, lists and mappings (inline tables); it is read back exactly.

    TOML has no null: what a mapping holds as ``None`` is left out; anywhere else it raises ``TypeError``.

    >>> toml_value({"a": [1, 0.1, True], "b c": float("inf")})
    '{ "a" = [1, 0.1, true], "b c" = inf }'
    """
    if isinstance(value, Mapping):
        return (
            "{ "
            + ", ".join(
                f"{toml_string(str(k))} = {toml_value(v)}"
                for k, v in value.items()
                if v is not None
            )
            + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return float.__repr__(value)  # inf and nan are TOML's own words
    if value is None:
        raise TypeError("TOML has no null")
    return toml_string(value)  # JSON writes all other values the same way


def toml_string(value: Any) -> str:
    """As JSON writes it; TOML allows no bare delete character, and no surrogates."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(
        "cannot write here",
        where=str(path),
        expected="a folder that this user may write to",
        got=f"{type(error).__name__}: {error.strerror or error}",
        do="choose another place with -o",
    )
