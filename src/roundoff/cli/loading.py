"""What a command says on a terminal while it loads libraries and that takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Between two lines. Somebody who watches should see something move every two seconds.
SECONDS = 1.5

#: Set from when the command speaks for itself, or runs what a user wrote.
_SPEAKS = threading.Event()


@contextmanager
def loading_said() -> Iterator[None]:
    """Say what is being loaded, until the block ends or ``be_still`` is called.

    Options are checked by the libraries that know them, so that most of the loading
    comes before a command runs. Whole lines, since others may print meanwhile; nothing
    where nobody watches.
    """
    if not sys.stderr.isatty():
        yield
        return
    _SPEAKS.clear()
    thread = threading.Thread(target=_say, args=(threading.get_ident(),), daemon=True)
    thread.start()
    try:
        yield
    finally:
        _SPEAKS.set()
        thread.join()


def be_still() -> None:
    """Say nothing of what is loaded from now on."""
    _SPEAKS.set()


def _say(thread: int) -> None:
    began = time.monotonic()
    while not _SPEAKS.wait(SECONDS):
        library = _loaded_in(thread)
        if library is not None:
            seconds = time.monotonic() - began
            line = f"roundoff: loading {library}, {seconds:.0f} s\n"
            sys.stderr.write(line)
            sys.stderr.flush()


def _loaded_in(thread: int) -> str | None:
    """Return the package that a thread is importing: the outermost that is not ours."""
    frame = sys._current_frames().get(thread)
    package = None
    while frame is not None:
        code = frame.f_code
        is_import = code.co_name == "_find_and_load"
        if is_import and code.co_filename.startswith("<frozen importlib"):
            name = str(frame.f_locals.get("name", "")).partition(".")[0]
            if name != "roundoff" or package is None:
                package = name
        frame = frame.f_back
    return package
