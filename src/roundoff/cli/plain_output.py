"""Standard output whose encoding lacks characters (``LANG=C``): plainer ones in their place.

Python would raise ``UnicodeEncodeError`` in the middle of a report. A script that is
recorded or watched keeps its output as it has it, errors included.
"""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from roundoff.cli.loading import be_still

_HANDLER = "roundoff.plainer"
#: Signs of reports; letters of names become escapes, by which they can be told apart.
_PLAINER = {
    "×": "x",
    "·": "*",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "∞": "inf",
    "µ": "u",
    "→": "->",
    "↓": "v",
    "…": "...",
    "–": "-",
    "—": "-",
    "−": "-",
    "─": "-",
    "│": "|",
    "█": "#",
    "▉": "#",
    "▊": "#",
    "▋": "#",
    "▌": "#",
    "▍": "#",
    "▎": ".",
    "▏": ".",
}


@contextmanager
def plainer_output() -> Iterator[None]:
    """Print what standard output cannot encode in plainer characters, within the block."""
    with _with_errors(_HANDLER):
        yield


@contextmanager
def output_of_script() -> Iterator[None]:
    """Within the block standard output is as Python made it, and we say nothing."""
    be_still()
    with _with_errors("strict"):
        yield


@contextmanager
def _with_errors(handler: str) -> Iterator[None]:
    stream = sys.stdout
    before = getattr(stream, "errors", None)
    if not isinstance(stream, io.TextIOWrapper) or before not in ("strict", _HANDLER):
        yield
        return
    stream.reconfigure(errors=handler)
    try:
        yield
    finally:
        if not stream.closed:
            stream.reconfigure(errors=before)


def _plainer(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    plainer = [_PLAINER.get(each) or ascii(each)[1:-1] for each in characters]
    return "".join(plainer), error.end


codecs.register_error(_HANDLER, _plainer)
