"""While libraries are loaded, a terminal hears of it; nobody else does."""

from __future__ import annotations

import importlib
import io
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from roundoff.cli import app, loading, talk
from roundoff.cli.options import progress
from roundoff.cli.plain_output import output_of_script


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two libraries, one of which imports the other, which is slow."""
    (tmp_path / "outer_library.py").write_text("import inner_library\n")
    (tmp_path / "inner_library.py").write_text("import time; time.sleep(0.5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loading, "SECONDS", 0.1)
    for name in ("outer_library", "inner_library"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def _load() -> None:
    for name in ("outer_library", "inner_library"):
        sys.modules.pop(name, None)
    importlib.import_module("outer_library")


def test_a_terminal_hears_of_it(slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with loading.loading_said():
        _load()
    _load()
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 2
    assert all(
        re.fullmatch(r"roundoff: loading outer_library, \d+ s", line) for line in lines
    )


def test_nobody_watches(slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with loading.loading_said():
        _load()
    assert stream.getvalue() == ""


def test_what_is_no_import_is_not_said(
    slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with loading.loading_said():
        time.sleep(0.3)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("begun", [lambda: progress(json=True), output_of_script])
def test_it_ends_where_a_bar_or_a_script_begins(
    slow: None,
    monkeypatch: pytest.MonkeyPatch,
    begun: Callable[[], AbstractContextManager[object]],
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with loading.loading_said(), begun():
        _load()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("option", ["quiet", "debug"])
def test_quiet_is_quiet(
    slow: None, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Set while options are read, before those behind it load anything."""

    def command(**_: object) -> None:
        talk._set(option)(True)
        _load()

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(app, "_command", lambda: command)
    assert app.main([]) == 0
    assert ("loading" in stream.getvalue()) == (option != "quiet")


def test_a_command_says_it(slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(app, "_command", lambda: lambda **_: _load())
    assert app.main([]) == 0
    assert "roundoff: loading outer_library" in stream.getvalue()
