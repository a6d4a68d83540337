"""A recording never kills a script: odd ones end plain, captured and watched alike, to the bit."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.scripts.odd import PRELUDE, SCRIPTS

from roundoff.cli.app import main

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def forked(work: Callable[[], int], folder: Path) -> tuple[int, str, str]:
    """The exit code, and what was printed, of work in a process that is forked."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                os.chdir(folder)
                for number, file in ((1, out), (2, err)):
                    os.dup2(file.fileno(), number)
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
                sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
                torch.set_num_threads(1)
                code = work()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:  # noqa: BLE001 - as Python itself
                sys.excepthook(*sys.exc_info())
                code = 1
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return os.waitstatus_to_exitcode(status), texts[0], texts[1]


def plain() -> int:
    import runpy

    sys.argv = ["script.py", "--a", "1"]
    sys.path.insert(0, "")
    runpy.run_path("script.py", run_name="__main__")
    return 0


WAYS = {
    "captured": ["capture", "-o", "run", "--steps", "all", "--"],
    "captured with tensors": ["capture", "-o", "run", "--keep", "tensors", "--"],
    "watched": ["watch", "--"],
}


def ended(name: str, way: str, folder: Path) -> tuple[int, str, str]:
    (folder / "script.py").write_text(PRELUDE + SCRIPTS[name])
    if way == "plain":
        return forked(plain, folder)
    return forked(lambda: main([*WAYS[way], "script.py", "--a", "1"]), folder)


def bits(text: str) -> list[str]:
    """What the script printed: not the summary of the verb."""
    return [
        line
        for line in text.splitlines()
        if line.startswith(
            ("(", "[", "caught", "__main__", "'", "True", "False", "Tagged")
        )
        or line.isdigit()
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_ends_alike(name: str, tmp_path: Path) -> None:
    if "transformers" in SCRIPTS[name]:
        pytest.importorskip("transformers")
    code, expected, error = ended(name, "plain", tmp_path)
    assert code in (0, 1, 7), error
    assert bits(expected), error
    for way in WAYS:
        place = tmp_path / way
        place.mkdir()
        found, printed, said = ended(name, way, place)
        assert bits(printed) == bits(expected), (way, said)
        assert "did not foresee" not in said, (way, said)
        if code == 0:
            assert "script failed" not in said + printed, (way, said)
            # watching tells of trouble, such as a loss of NaN
            assert found in ((0, 1) if way == "watched" else (0,)), (way, said)
        else:
            assert found != 0, (way, said)
