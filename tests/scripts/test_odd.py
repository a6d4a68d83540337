"""A recording never kills a script: odd ones end plain, captured and watched alike, to the bit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scripts.odd import SCRIPTS
from tests.scripts.odd_server import PLAIN, WAYS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
ROOT = Path(__file__).parents[2]
#: How the lines begin that scripts print, and verbs do not.
_OF_SCRIPTS = ("(", "[", "caught", "__main__", "'", "True", "False", "Tagged", "torch.")
#: Endings of a verb that are about the script, which it leaves as it is.
_NO_STEP = "no step ended in this script"


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str, Path], dict[str, Any]]]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.scripts.odd_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:

        def ask(name: str, folder: Path) -> dict[str, Any]:
            pipes: Any = process
            pipes.stdin.write(json.dumps([name, str(folder)]) + "\n")
            pipes.stdin.flush()
            endings: dict[str, Any] = json.loads(pipes.stdout.readline())
            return endings

        yield ask
        process.kill()


def bits(text: str) -> list[str]:
    """What the script itself printed."""
    lines = text.splitlines()
    return [line for line in lines if line.startswith(_OF_SCRIPTS) or line.isdigit()]


def test_there_are_at_least_forty() -> None:
    assert len(SCRIPTS) >= 40


@pytest.mark.parametrize("name", SCRIPTS)
def test_ends_alike(
    run: Callable[[str, Path], dict[str, Any]], name: str, tmp_path: Path
) -> None:
    if "transformers" in SCRIPTS[name] and not importlib.util.find_spec("transformers"):
        pytest.skip("needs transformers")
    endings = run(name, tmp_path)
    code, expected, error = endings[PLAIN]
    assert code in (0, 1, 7), error
    assert bits(expected), error
    for way in WAYS:
        found, printed, said = endings[way]
        assert bits(printed) == bits(expected), (way, said)
        assert "did not foresee" not in said, (way, said)
        if code != 0:
            assert found != 0, (way, said)
            continue
        assert "script failed" not in said + printed, (way, said)
        # watching tells of trouble, such as a loss of NaN; a script without an optimizer has no step
        allowed = (0, 1) if way == "watched" else (0,)
        assert found in allowed or _NO_STEP in said, (way, said)
