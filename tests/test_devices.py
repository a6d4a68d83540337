"""The tests that run on any device, on a second one that needs no hardware."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    "file", sorted(p.name for p in TESTS.glob("devices/test_*.py"))
)
def test_on_the_pretended_device(file):
    """A device is added to a process for good, so each file has a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/devices/{file}"],
        cwd=TESTS.parent,
        env=os.environ | {"PRETEND": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout
