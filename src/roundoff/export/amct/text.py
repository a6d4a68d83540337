"""AMCT's files in protobuf's text format, read so that an error names the line.

AMCT merges its files: of a field that stands twice it keeps the last, of two algorithms that exclude each other too,
without a word. Here both are errors with both lines.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from roundoff.errors import QuantizationError, did_you_mean, nearest
from roundoff.export.amct.schema import message_class
from roundoff.files import write_text

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<name>[A-Za-z_]\w*)"""
    r"""|(?P<open>[{<])|(?P<close>[}>])|(?P<rest>[^\s{}<>#"']+?(?=[\s{}<>#"':;,\[\]]|$)|.)"""
)

_PLACE = re.compile(r"^(\d+:\d+ : (?:'.*': )?)+", re.DOTALL)

#: Where a field stands: ``("record", 2, "value", 0, "scale_d", 0)`` → its line, counted from 1.
Lines = dict[tuple[str | int, ...], int]


def read_text(path: str | Path, file: str) -> tuple[Any, Lines]:
    """The message in a file of this kind (a key of ``schema.FILES``), and the line of each field.

    Raises ``QuantizationError`` naming the line: an unknown field (with the nearest), one that may stand once and stands
    twice, two of which only one may be given, a value of another type, a required field that is missing.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizationError(
            f"not a readable file: {error}", where=str(path)
        ) from error
    return parse_text(text, file, str(path))


def parse_text(text: str, file: str, where: str) -> tuple[Any, Lines]:
    """As :func:`read_text`, of a text."""
    message = message_class(file)()
    from google.protobuf import text_format

    lines = _lines(text, message.DESCRIPTOR, where)
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        line = error.GetLine()
        got = (
            (text.splitlines() or [""])[
                min(line or 1, text.count("\n") + 1) - 1
            ].strip()
            if line
            else None
        )
        said = _PLACE.sub("", str(error))  # protobuf puts place and line in front
        raise QuantizationError(
            f"not {_KINDS[file]}: {said}",
            where=f"{where}, line {line}" if line else where,
            got=repr(got[:60]) if got is not None else None,
        ) from error
    missing = message.FindInitializationErrors()
    if missing:
        raise QuantizationError(
            f"not {_KINDS[file]}: {missing[0]} is missing",
            where=where,
            expected=", ".join(missing),
        )
    return message, lines


def write_message(message: Any, path: str | Path) -> None:
    """Write a message in the text format."""
    from google.protobuf import text_format

    write_text(path, text_format.MessageToString(message, as_utf8=True))


_KINDS = {
    "record": "an AMCT record",
    "calibration": "an AMCT calibration configuration",
    "kv_cache": "an AMCT configuration of the KV cache",
    "retrain": "an AMCT retrain configuration",
    "auto_prune": "an AMCT configuration of automatic pruning",
}


def _lines(text: str, descriptor: Any, where: str) -> Lines:
    """Walk the fields with their lines; what is no text format at all is left to the parser."""
    found: Lines = {}
    counts: Counter[tuple[str | int, ...]] = Counter()
    stack: list[tuple[Any, tuple[str | int, ...]]] = [(descriptor, ())]
    pending: tuple[Any, tuple[str | int, ...]] | None = None
    before = ""
    line = 1
    for token in _TOKEN.finditer(text):
        line_here, kind = line, token.lastgroup
        line += token[0].count("\n")
        if kind == "space":
            continue
        here, path = stack[-1]
        if kind == "open":
            if pending is None:
                return found
            stack.append(pending)
            pending = None
        elif kind == "close":
            stack.pop()
            if not stack:
                return found
        elif kind == "name" and before not in (
            ":",
            "-",
        ):  # a value's name comes after a colon
            field = here.fields_by_name.get(token[0]) if here is not None else None
            if field is None and before in ("[", ","):
                continue  # a name within a list of values
            if here is not None:
                field = field or _unknown(token[0], here, f"{where}, line {line_here}")
                own = (*path, token[0], counts[(*path, token[0])])
                counts[own[:-1]] += 1
                _check_once(field, own, found, f"{where}, line {line_here}")
                found[own] = line_here
                pending = (
                    (field.message_type, own)
                    if field.message_type is not None
                    else None
                )
        before = token[0] if kind == "rest" else ""
    return found


def _unknown(name: str, descriptor: Any, where: str) -> Any:
    known = list(descriptor.fields_by_name)
    raise QuantizationError(
        f"an unknown field: {name}",
        where=where,
        expected=", ".join(known),
        do=did_you_mean(nearest(name, known, at_most=1)),
    )


def _check_once(
    field: Any, own: tuple[str | int, ...], found: Lines, where: str
) -> None:
    first = found.get((*own[:-1], 0))
    repeated = (
        field.is_repeated
        if hasattr(field, "is_repeated")
        else field.label == field.LABEL_REPEATED
    )
    if first is not None and not repeated:
        raise QuantizationError(
            f"{field.name} stands twice",
            where=where,
            got=f"the first is at line {first}",
            do="keep one: AMCT would take the last without a word",
        )
    group = field.containing_oneof
    for other in group.fields if group is not None else ():
        there = found.get((*own[:-2], other.name, 0))
        if there is not None and other.name != field.name:
            raise QuantizationError(
                f"{field.name} and {other.name} exclude each other",
                where=where,
                got=f"{other.name} at line {there}",
                do="keep one: AMCT would take the last without a word",
            )
