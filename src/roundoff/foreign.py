"""What comes from other people's files: read within limits, shown so that it does no harm.

A file may be anybody's. Whatever reads JSON or TOML does it by ``parse_json`` and
``parse_toml``, whatever makes a path of a name that a file or an archive holds by
``inside``, and whatever shows such text by ``visible``.
"""

from __future__ import annotations

import collections.abc
import errno
import functools
import io
import json
import re
import stat
import sys
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = [
    "check_memory",
    "fault_of",
    "inside",
    "is_too_deep",
    "memory_left",
    "parse_json",
    "parse_toml",
    "read_bytes",
    "read_text",
    "regular",
    "script_lines",
    "visible",
    "without_secrets",
]

#: Bytes of a text that is read whole.
LARGEST_TEXT = 256 * 2**20
#: Levels of lists and objects within each other; files of roundoff have five.
DEEPEST = 60

#: Controls but for the end of a line: C0, delete and C1, which terminals obey; marks
#: that turn the direction of what follows; halves of a pair, which nothing can print.
_HARMFUL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str, *, lines: bool = True) -> str:
    r"""Return a text with its control characters as escapes, so that no terminal obeys them.

    Args:
        text: from a file, or with parts from one.
        lines: the ends of lines stay as they are; else they become escapes too.

    >>> visible("a\x1b[2Jb\u202ec")
    'a\\x1b[2Jb\\u202ec'
    >>> visible("two\nlines", lines=False)
    'two\\nlines'
    """
    if text.isascii() and text.isprintable():
        return text
    shown = _HARMFUL.sub(lambda match: _escaped(match[0]), text)
    return shown if lines else shown.replace("\n", "\\n")


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]


def script_lines(text: str) -> list[str]:
    r"""Return the lines of a script with their ends, as Python counts them.

    A form feed ends none, as it does for ``str.splitlines``.

    >>> script_lines("one\n\x0ctwo\r\nthree")
    ['one\n', '\x0ctwo\r\n', 'three']
    """
    return list(io.StringIO(text, newline=""))


def regular(path: Path) -> Path:
    """Return the path of a file that has an end: reading a pipe or a device may never return.

    Links are followed. Raises ``OSError`` for anything but a file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raises ``OSError``, and ``ValueError`` where it is too large."""
    size = regular(path).stat().st_size
    if size > LARGEST_TEXT:
        raise ValueError(f"{size} bytes: such a file has less than {LARGEST_TEXT}")
    return path.read_bytes()


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a file, universal newlines. Raises ``OSError``, and
    ``ValueError`` where it is too large or no text.
    """
    text = read_bytes(path).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def memory_left() -> int | None:
    """Return the bytes that this process may still take; None where nothing says so.

    The least of what the machine has, of the process' own limit and of its group's.
    """
    left = [_available(), _left_of_limit(), _left_of_group()]
    sizes = [size for size in left if size is not None]
    return max(0, min(sizes)) if sizes else None


def _available() -> int | None:
    for line in _lines_of("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_of_limit() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _lines_of("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not used:
        return None
    return int(limit - int(used[0].split()[0]) * resource.getpagesize())


def _left_of_group() -> int | None:
    limit = _lines_of("/sys/fs/cgroup/memory.max")
    used = _lines_of("/sys/fs/cgroup/memory.current")
    if not limit or not used or not limit[0].isdigit():
        return None
    return int(limit[0]) - int(used[0])


def _lines_of(name: str) -> list[str]:
    try:
        return Path(name).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []


def check_memory(size: int, what: str) -> None:
    """Raise ``ValueError`` where something from a file needs more memory than there is.

    What a file says of its sizes costs it nothing: a tensor of 2^40 values is a hole in
    a file, or one value that is repeated.
    """
    left = memory_left()
    if left is not None and size > left:
        needed = f"{size / 2**30:.3g} GiB of memory"
        raise ValueError(f"{what} needs {needed}, and {left / 2**30:.3g} GiB are left")


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return what ``json.loads`` does; ``ValueError`` also for what is nested too deep, and for
    halves of characters, which no file can be written with.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
        ...
    ValueError: more than 60 levels of lists and objects
    """
    if is_too_deep(text):
        raise ValueError(f"more than {DEEPEST} levels of lists and objects")
    try:
        value = json.loads(text, **options)
        if _has_halves(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a character: {error.reason}") from None
    except RecursionError:  # what is counted above is the text's, in strings too
        raise ValueError(f"more than {DEEPEST} levels of lists and objects") from None


def _has_halves(text: str | bytes) -> bool:
    """Return True where an escape may be half of a character."""
    escape = b"\\ud" if isinstance(text, bytes) else "\\ud"
    return escape in text.lower()  # type: ignore[operator]


def parse_toml(text: str) -> dict[str, Any]:
    """Return what ``tomllib.loads`` does; ``ValueError`` also for what is nested too deep."""
    if is_too_deep(text) or _DEEP_KEY.search(text):
        raise ValueError(f"more than {DEEPEST} levels of arrays and tables")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} levels of arrays and tables") from None


# All of these take time in proportion to the text, whatever it holds: a string that no
# quote ends goes to the end of its line, and is not looked at again from its middle.
_DEEP_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST}}}"""
)
_STRINGS = re.compile(r'"(?:[^"\\\n]|\\.)*+"?')
_STRINGS_IN_BYTES = re.compile(rb'"(?:[^"\\\n]|\\.)*+"?')
_OTHERS = re.compile(r"[^\[\]{}]+")
_OTHERS_IN_BYTES = re.compile(rb"[^\[\]{}]+")


def is_too_deep(text: str | bytes) -> bool:
    """Return True where brackets outside strings are opened more than ``DEEPEST`` levels deep.

    >>> is_too_deep("[" * 61), is_too_deep("[]" * 61), is_too_deep('"' + "[" * 61 + '"')
    (True, False, False)
    """
    if isinstance(text, bytes):
        brackets = _OTHERS_IN_BYTES.sub(b"", _STRINGS_IN_BYTES.sub(b"", text)).decode()
    else:
        brackets = _OTHERS.sub("", _STRINGS.sub("", text))
    level = 0
    for bracket in brackets:
        level += 1 if bracket in "[{" else -1
        if level > DEEPEST:
            return True
    return False


def inside(folder: Path, name: str) -> Path | None:
    r"""Return the path of a name below a folder; None for a name that leads out of it.

    Names of archives, URLs and files: an absolute one, one with ``..``, a drive, a
    backslash or a control character leads out.

    >>> inside(Path("a"), "b/c").as_posix()
    'a/b/c'
    >>> [inside(Path("a"), name) for name in ("../b", "/b", "b/../../c", "c:\\x", "")]
    [None, None, None, None, None]
    """
    parts = PurePosixPath(name).parts
    harmful = not parts or name.startswith("/") or ".." in parts or "\\" in name
    if harmful or PureWindowsPath(name).drive or visible(name, lines=False) != name:
        return None
    return folder.joinpath(*parts)


# -- secrets ---------------------------------------------------------------------------

_HIDDEN = "***"
_SECRET = re.compile(
    r"(?:^|[-_.])(?:api[-_]?key|access[-_]?key|private[-_]?key|secret(?:[-_]?key)?|key|token|"
    r"auth|authorization|password|passwd|passphrase|pass|pwd|pw|credentials?|cookie)s?$",
    re.IGNORECASE,
)
#: Secrets that tell themselves by how they begin, as services make them.
_TELLING = re.compile(
    r"(?:sk-|hf_|gh[opsur]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|ya29\.|eyJ)[\w.~+/=-]{8,}"
)
_USER = re.compile(
    r"(?<=://)[^/\s@]+(?=@)|(?<![\w.:/@+-])[\w.+-]+:[^\s@/]+(?=@[\w.-]+)"
)
#: Inside a word: a header, a piece of JSON or of a configuration.
_INNER = re.compile(
    r"((?:api[-_]?key|access[-_]?key|secret[\w-]*|token|password|passwd|passphrase|"
    r"authorization|cookie)[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic)\s+)?)[^\s\"',}&]+",
    re.IGNORECASE,
)
_QUERY = re.compile(r"([?&][^=&\s]+=)[^&\s'\"]+")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command with what looks like a secret masked.

    That is what follows an option whose name says so, users and passwords of URLs and
    what they ask for, and the keys that services make.

    >>> without_secrets(["a.py", "--api-key", "abc", "--password=x", "--db", "pg://u:p@host/x"])
    ['a.py', '--api-key', '***', '--password=***', '--db', 'pg://***@host/x']
    >>> without_secrets(["--token", "--steps", "3", "--key-size", "8", "WANDB_API_KEY=abc"])
    ['--token', '--steps', '3', '--key-size', '8', 'WANDB_API_KEY=***']
    >>> without_secrets(["me:secret@host", "Authorization: Bearer abc", "a:b", "x@y", '{"token": "t"}'])
    ['***@host', 'Authorization: Bearer ***', 'a:b', 'x@y', '{"token": "***"}']
    """
    masked = []
    follows = False
    for word in words:
        is_option = word.startswith("-") and len(word) > 1
        if follows and not is_option:
            masked.append(_HIDDEN)
        else:
            masked.append(_masked(word))
        follows = is_option and "=" not in word and _names_secret(word)
    return masked


def _masked(word: str) -> str:
    name, equals, value = word.partition("=")
    if equals and value and _names_secret(name):
        return f"{name}={_HIDDEN}"
    without = _TELLING.sub(_HIDDEN, _USER.sub(_HIDDEN, word))
    without = _INNER.sub(rf"\1{_HIDDEN}", without)
    return _QUERY.sub(rf"\1{_HIDDEN}", without) if "://" in word else without


def _names_secret(option: str) -> bool:
    """Return True for an option or a variable whose name says that a secret follows."""
    name = option.rpartition("/")[2].lstrip("-+")
    return _SECRET.search(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)) is not None


# -- schemas ---------------------------------------------------------------------------

#: What a type is called in a message.
_CALLED = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "nothing",
}


def fault_of(record: Any) -> str | None:
    """Say where a record does not hold what its fields are declared as; None where it does.

    The fields of a frozen dataclass are the schema of what is read from a file: texts,
    numbers of at most 64 bits, lists, mappings and further records.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Point:
    ...     x: float
    ...     names: tuple[str, ...] = ()
    >>> fault_of(Point(1, ("a",)))
    >>> fault_of(Point(1.0, ("a", None)))
    'names[1] is nothing, not a text'
    """
    cls: Any = type(record)
    for name, annotation in _annotations(cls).items():
        fault = _fault(getattr(record, name), annotation, name)
        if fault is not None:
            return fault
    return None


@functools.cache
def _annotations(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, _names_of(cls))
    return {each.name: hints[each.name] for each in fields(cls)}


def _names_of(cls: Any) -> dict[str, Any]:
    return {**vars(sys.modules[cls.__module__]), **vars(collections.abc)}


def _fault(value: Any, annotation: Any, at: str) -> str | None:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if annotation is Any:
        return None
    if origin in (Union, types.UnionType):
        faults = [_fault(value, each, at) for each in arguments]
        return None if None in faults else faults[0]
    if origin is Literal:
        return None if value in arguments else _complaint(at, value, str(arguments))
    if origin is not None and issubclass(origin, Mapping):
        return _fault_in_mapping(value, arguments, at)
    if origin is not None and issubclass(origin, Sequence):
        return _fault_in_list(value, arguments, at)
    if is_dataclass(annotation):
        return _fault_in_record(value, annotation, at)
    return _fault_of_one(value, annotation, at)


def _fault_of_one(value: Any, annotation: Any, at: str) -> str | None:
    called = _CALLED.get(annotation, getattr(annotation, "__name__", str(annotation)))
    if annotation is float:
        is_right = isinstance(value, int | float) and not isinstance(value, bool)
    elif annotation is int:
        is_right = isinstance(value, int) and not isinstance(value, bool)
    else:
        is_right = isinstance(value, annotation)
    if not is_right:
        return _complaint(at, value, called)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"{at} has more than 64 bits"
    return None


def _fault_in_mapping(value: Any, arguments: Sequence[Any], at: str) -> str | None:
    if not isinstance(value, Mapping):
        return _complaint(at, value, "an object")
    for key, item in value.items():
        shown = f"{at}[{str(key)[:40]!r}]"
        fault = _fault(key, arguments[0], shown) or _fault(item, arguments[1], shown)
        if fault is not None:
            return fault
    return None


def _fault_in_list(value: Any, arguments: Sequence[Any], at: str) -> str | None:
    if not isinstance(value, list | tuple):
        return _complaint(at, value, "a list")
    for place, item in enumerate(value):
        fault = _fault(item, arguments[0], f"{at}[{place}]")
        if fault is not None:
            return fault
    return None


def _fault_in_record(value: Any, annotation: Any, at: str) -> str | None:
    if not isinstance(value, annotation):
        return _complaint(at, value, "an object")
    fault = fault_of(value)
    return None if fault is None else f"{at}.{fault}"


def _complaint(at: str, value: Any, expected: str) -> str:
    called = _CALLED.get(type(value))
    if called is None:
        called = "a list" if isinstance(value, list | tuple) else "an object"
    return f"{at} is {called}, not {expected}"
