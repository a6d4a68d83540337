"""Which files are linted, and their text; what is not read has a reason."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from roundoff.foreign import parse_json

#: Bytes of a script; generated files may have more, written ones have not.
LARGEST = 2 * 2**20
#: Bytes of a notebook, which holds its pictures too.
LARGEST_NOTEBOOK = 64 * 2**20
_SUFFIXES = (".py", ".ipynb")
_SKIPPED = {
    ".git",
    ".hg",
    ".venv",
    "venv",
    ".tox",
    ".nox",
    "node_modules",
    "__pycache__",
    ".ipynb_checkpoints",
    ".mypy_cache",
    ".ruff_cache",
    "build",
    "dist",
    "site-packages",
}


class UnreadableError(ValueError):
    """A file that cannot be linted; the message is the reason."""


@dataclass(frozen=True)
class Text:
    """The code of a file.

    Args:
        path: the file.
        code: what is linted.
        cells: of a notebook, the number of the cell and the line in it for each line of
            the code; empty for a script.
        has_mark: the file begins with a byte-order mark.
    """

    path: Path
    code: str
    cells: tuple[tuple[int, int], ...] = ()
    has_mark: bool = False


def files_below(path: Path, exclude: Iterable[str]) -> Iterator[Path]:
    """Yield a file, or the scripts and notebooks of a folder, in the order of names."""
    if not path.is_dir():
        yield path
        return
    excluded = tuple(exclude)
    for folder, folders, names in os.walk(path):
        base = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and not is_excluded(base / name, excluded)
        )
        for name in sorted(names):
            file = base / name
            if file.suffix in _SUFFIXES and not is_excluded(file, excluded):
                yield file


def is_excluded(path: Path, patterns: Iterable[str]) -> bool:
    """Return True where a pattern matches the path, an end of it, or a folder's name.

    >>> is_excluded(Path("a/tests/b.py"), ["tests"]), is_excluded(Path("a/b.py"), ["a/*.py"])
    (True, True)
    """
    text = path.as_posix()
    return any(
        fnmatch(text, pattern) or fnmatch(text, f"*/{pattern}") or pattern in path.parts
        for pattern in (each.rstrip("/") for each in patterns)
    )


def read(path: Path) -> Text:
    """Return the code of a file. Raises ``UnreadableError`` with the reason."""
    try:
        if not path.is_file():
            raise UnreadableError("not a file")
        size = path.stat().st_size
        most = LARGEST_NOTEBOOK if path.suffix == ".ipynb" else LARGEST
        if size > most:
            raise UnreadableError(
                f"{size:,} bytes: more than the {most:,} that are read"
            )
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UnreadableError(reason) from None
    if path.suffix == ".ipynb":
        return _notebook(path, _decoded(data, "utf-8-sig"))
    return _script(path, data)


def _script(path: Path, data: bytes) -> Text:
    encoding = encoding_of(data)
    has_mark = data.startswith(codecs.BOM_UTF8)
    return Text(path, _decoded(data, encoding), has_mark=has_mark)


def encoding_of(data: bytes) -> str:
    """Return the encoding that a script declares in its first two lines, UTF-8 without.

    Raises ``UnreadableError`` where Python knows none of that name.
    """
    lines = io.BytesIO(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
    try:
        encoding, _ = tokenize.detect_encoding(lines.readline)
    except (SyntaxError, UnicodeDecodeError) as error:
        if _UTF_16.match(data):
            raise UnreadableError("not UTF-8: it is UTF-16") from None
        reason = str(error) if "encoding" in str(error) else "the first lines"
        raise UnreadableError(f"not UTF-8: {reason}") from None
    return encoding


def encoded(text: str, before: bytes) -> bytes:
    """Return the bytes of a mended script, in the encoding that its file had before."""
    mark = codecs.BOM_UTF8 if before.startswith(codecs.BOM_UTF8) else b""
    return mark + text.encode(encoding_of(before).removesuffix("-sig"))


_UTF_16 = re.compile(rb"\xff\xfe|\xfe\xff")


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        name = "UTF-8" if encoding.startswith("utf-8") else encoding
        raise UnreadableError(f"not {name}: byte {error.start}") from None


def _notebook(path: Path, text: str) -> Text:
    """Return the code cells of a notebook as one script; magics become ``pass``."""
    try:
        sources = list(_code_cells(parse_json(text)))
    except (ValueError, KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise UnreadableError("not a notebook") from None
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    for source, cell in sources:
        if source.lstrip().startswith("%%"):
            continue
        for number, line in enumerate(source.split("\n"), 1):
            lines.append(_without_magic(line))
            places.append((cell, number))
    return Text(path, "\n".join(lines), tuple(places))


def _code_cells(notebook: Any) -> Iterator[tuple[str, int]]:
    """Yield the text and the number of each code cell, also of notebooks before format 4."""
    sheets = notebook.get("worksheets", [notebook])
    cells = [cell for sheet in sheets for cell in sheet["cells"]]
    for number, cell in enumerate(cells, 1):
        if cell["cell_type"] == "code":
            yield "".join(cell["source"] if "source" in cell else cell["input"]), number


def _without_magic(line: str) -> str:
    bare = line.lstrip()
    if bare.startswith(("%", "!", "?")):
        return line[: len(line) - len(bare)] + "pass"
    return line
