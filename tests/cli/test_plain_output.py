"""Where output cannot be encoded, or nobody reads it, a command ends as it would."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from roundoff.cli.app import UNREAD, main
from roundoff.cli.plain_output import output_of_script, plainer_output

SIGNS = "3 × 2 → ∞ µs … – ─ ü \udcff"


def _ascii() -> tuple[io.BytesIO, io.TextIOWrapper]:
    raw = io.BytesIO()
    return raw, io.TextIOWrapper(raw, encoding="ascii", write_through=True)


def test_signs_are_plainer(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, stream = _ascii()
    monkeypatch.setattr(sys, "stdout", stream)
    with plainer_output():
        sys.stdout.write(SIGNS + "\n")
    assert raw.getvalue() == b"3 x 2 -> inf us ... - - \\xfc \\udcff\n"
    with pytest.raises(UnicodeEncodeError):
        sys.stdout.write(SIGNS + "\n")


def test_a_script_keeps_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, stream = _ascii()
    monkeypatch.setattr(sys, "stdout", stream)
    with plainer_output(), output_of_script(), pytest.raises(UnicodeEncodeError):
        sys.stdout.write(SIGNS + "\n")
    assert not raw.getvalue()


def test_another_stream_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with plainer_output():
        sys.stdout.write(SIGNS + "\n")
    assert stream.getvalue() == SIGNS + "\n"


def test_a_verb_in_ascii(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "gr\u00f6\u00dfe.py"
    script.write_text("import torch\ntorch.cuda.amp.autocast()\n")
    raw, stream = _ascii()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["lint", str(script)]) in (0, 1)
    assert b"gr\\xf6\\xdfe.py" in raw.getvalue()


def test_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["--help"]) == UNREAD


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["--help"]) == 2
    assert "cannot write: " in capsys.readouterr().err
