"""Every verb that reads files, on files that mean harm: nothing crashes, hangs, gets out or reaches the terminal.

``make fuzz`` sets ROUNDOFF_FUZZ to the number of examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hostile.commands import _complaint
from tests.hostile.honest import COMMANDS
from tests.hostile.server import Server, serving

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="of Linux")
EXAMPLES = int(os.environ.get("ROUNDOFF_FUZZ", "8"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("range")) as process:
        yield process


#: What has harmed before: a command and the seed of its attack.
HARMFUL = (
    ("plan {budget.parquet} --target 30dB -o out.toml", 1026),
    ("compare {saved} --html out.html", 1057),
    ("plan convert {te.yaml} --to plan -o out.toml --format bf16 --partial", 1076),
    ("replay {ref}", 1326),
    ("compare {ref} {cand} --stats", 3731),
    ("check {a.pt} {b.pt}", 530036),
)


@pytest.mark.parametrize(("command", "seed"), HARMFUL)
def test_what_has_harmed(server: Server, command: str, seed: int) -> None:
    complaint, output, _ = server.end_of(command, seed)
    assert complaint is None, output


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(command=st.sampled_from(COMMANDS), seed=st.integers(0, 10**6))
def test_nothing_harms(server: Server, command: str, seed: int) -> None:
    complaint, output, _ = server.end_of(command, seed)
    assert complaint is None, output


@pytest.mark.parametrize(
    ("status", "output", "seconds"),
    [
        (11, "", 0.1),
        (0, "a\x1b[2Jb", 0.1),
        (0, "a\u202eb", 0.1),
        (0, "Traceback (most recent call last):", 0.1),
        (512, "an error that roundoff did not foresee", 0.1),
        (0, "", 11.0),
    ],
)
def test_harm_is_seen(status: int, output: str, seconds: float) -> None:
    assert _complaint(status, output, seconds) is not None
    assert _complaint(512, "roundoff: no such file\n", 0.5) is None


def test_an_archive_writes_nothing_outside(tmp_path: Path) -> None:
    """The names of members alone: what fsspec lists of an archive."""
    from roundoff.record.disk.remote import _relative_names

    names = ["run.json", "../../stack.json", "/etc/x", "rank0/../../y", "a\\..\\z"]
    listing = {
        f"/{name}" if i == 0 else name: {"size": 1} for i, name in enumerate(names)
    }
    assert [*_relative_names(listing, "")] == ["run.json", "etc/x"]
