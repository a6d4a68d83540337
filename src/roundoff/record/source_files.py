"""Which source files a recorded script is made of: what was edited since shows in them."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Digits of a hash that are kept: 64 bits, to tell versions of one file apart.
_DIGITS = 16


def script_source(command: Sequence[str]) -> dict[str, str]:
    """Return the hash of the script by its name; empty for a module or no command.

    Read before the script runs: it may be edited while it does.
    """
    script = Path(command[0]) if command else None
    if script is None or not script.is_file():
        return {}
    digest = _digest(script)
    return {} if digest is None else {script.name: digest}


def imported_sources(command: Sequence[str]) -> dict[str, str]:
    """Return the hashes of imported files that stand in the script's folder or below.

    By path relative to it; for a module the working directory. Installed packages are
    left out: versions tell of them.
    """
    if not command:
        return {}
    script = Path(command[0])
    top = (script.parent if script.is_file() else Path()).resolve()
    installed = [Path(place).resolve() for place in _places_of_packages()]

    @functools.cache  # thousands of modules stand in few folders
    def below(folder: str) -> Path | None:
        """Return a folder relative to the top one; None for another's."""
        path = Path(folder).resolve()
        if any(path.is_relative_to(place) for place in installed):
            return None
        return path.relative_to(top) if path.is_relative_to(top) else None

    sources = {}
    for folder, name in _imported_files():
        place = below(folder)
        digest = None if place is None else _digest(Path(folder, name))
        if place is not None and digest is not None:
            sources[(place / name).as_posix()] = digest
    return sources


def _imported_files() -> Iterator[tuple[str, str]]:
    """Yield folder and name of the files of Python of all modules."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py"):
            yield os.path.split(
                os.path.realpath(file) if os.path.islink(file) else file
            )


def _places_of_packages() -> list[str]:
    """Return where Python and installed packages are, and this package."""
    places = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [*(places[name] for name in names), str(Path(__file__).parents[1])]


def _digest(path: Path) -> str | None:
    """Return the hash of a file; None where it cannot be read any more."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
