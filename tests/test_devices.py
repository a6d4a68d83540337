"""The tests that run on any device, on a second one that needs no hardware."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_on_the_pretended_device():
    """A device is added to a process for good: these tests have one of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/devices"],
        cwd=TESTS.parent,
        env=os.environ | {"PRETEND": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout
