"""Which recordings are this user's own: their steps bear a mark that only this user can make.

The mark of a step is the HMAC-SHA256, with a key that lies in the user's state folder
and that nobody else can read, of its table and of the checksums of its other files.
What bears none, or another's, is a recording of somebody else, however it got here.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from roundoff.foreign import regular
from roundoff.record.disk.schema import CHECKSUMS, MARK, OPERATORS

_KEY_BYTES = 32


def write_mark(folder: Path) -> None:
    """Mark the step in a folder as this user's; nothing where no key can be kept."""
    key = _key(make=True)
    if key is None:
        return
    with suppress(OSError):
        (folder / MARK).write_text(_mark(folder, key), encoding="ascii")


def is_own(folder: Path) -> bool:
    """Return True for a step that this user has recorded and nobody has changed."""
    key = _key(make=False)
    if key is None:
        return False
    try:
        present = regular(folder / MARK).read_bytes()[:128]
        return hmac.compare_digest(present, _mark(folder, key).encode("ascii"))
    except OSError:
        return False


def _mark(folder: Path, key: bytes) -> str:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    with regular(folder / OPERATORS).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update(regular(folder / CHECKSUMS).read_bytes())
    return digest.hexdigest()


def _key(*, make: bool) -> bytes | None:
    """Return this user's key; None where there is none, or others could have read it."""
    path = _key_file()
    if path is None:
        return None
    try:
        if make and not path.exists():
            _make_key(path)
        if path.stat().st_mode & 0o077 and os.name == "posix":
            return None
        key = path.read_bytes()
    except OSError:
        return None
    return key if len(key) == _KEY_BYTES else None


def _make_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # of another process, a moment ago
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _key_file() -> Path | None:
    """Return where the key lies, by the rules for a user's state; None without a home."""
    state = os.environ.get("XDG_STATE_HOME")
    if state and Path(state).is_absolute():
        return Path(state, "roundoff", "key")
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".local" / "state" / "roundoff" / "key"
