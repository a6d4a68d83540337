"""What a process runs to record a script; ``arguments`` is given to it as a global."""

import contextlib
import io
import os

from roundoff.record import capture_script


def record(script, run, environment, options):
    """Record a script under these variables of the environment."""
    os.environ.update(dict(environment))
    with contextlib.redirect_stdout(io.StringIO()):
        capture_script([script], run, **options)


if "arguments" in globals():
    record(*globals()["arguments"])
