"""Exceptions that nobody foresaw: what was going on, one message, a file without anything of the user's."""

import os

import polars as pl
import pytest
import torch
from torch import nn

import roundoff
from roundoff.budget import Budget
from roundoff.errors import QuantizationError, RoundoffError, WorkloadError
from roundoff.quantize.graph import trace
from roundoff.unforeseen import (
    going_on,
    note,
    notes_of,
    panics_raised,
    report_text,
    save_report,
    unforeseen_message,
)
from roundoff.workload.workload import Workload


def caught(what, *going):
    try:
        raise what
    except (KeyError, ValueError) as error:
        for text in going:
            note(error, text)
        return error


def test_notes_name_the_innermost_first_and_each_once():
    with (
        pytest.raises(KeyError) as raised,
        going_on("quantize"),
        going_on("a/linear"),
        going_on("a/linear"),
    ):
        raise KeyError("x")
    assert notes_of(raised.value) == ["a/linear", "quantize"]


def test_errors_of_roundoff_are_left_as_they_are():
    with pytest.raises(QuantizationError) as raised, going_on("quantize"):
        raise QuantizationError("no")
    assert notes_of(raised.value) == []


def test_the_message_and_the_file():
    error = caught(ValueError("wrong\nand more"), "body/relu", "calibrate")
    path = save_report(error, ["quantize", "net.py", "--token=secret", "-o", "out"])
    assert path is not None
    message = unforeseen_message(error, path)
    assert message.startswith(
        "an error that roundoff did not foresee: ValueError: wrong\n"
        "  where: body/relu, in calibrate\n"
    )
    assert str(path) in message
    text = path.read_text(encoding="utf-8")
    assert f"torch {torch.__version__}" in text
    assert "command: quantize --token -o" in text
    assert "secret" not in text
    assert "net.py" not in text
    assert "test_unforeseen.py" in text
    assert "raise what" not in text  # no line of anyone's code
    path.unlink()


def test_the_file_has_the_causes():
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise TypeError("second") from first
    except TypeError as error:
        text = report_text(error)
    assert text.index("TypeError: second") < text.index("KeyError: 'first'")


def test_without_a_place_for_the_file_the_message_does_without(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    error = caught(ValueError("wrong"))
    assert save_report(error) is None
    assert "report" not in unforeseen_message(error, None)


def test_what_roundoff_fails_at_is_not_blamed_on_the_users_line(monkeypatch):
    """In the pass that traces, at a call of the model's."""
    monkeypatch.setattr("roundoff.quantize.graph._reads_integers", None)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(TypeError, match="not callable") as raised:
        trace(Workload(net, [torch.ones(5, 4)]))
    assert notes_of(raised.value) == ["0/linear"]


def test_what_torch_refuses_is_the_users():
    class Net(nn.Module):
        def forward(self, x):
            return x @ x

    workload = Workload(Net(), [torch.ones(2, 3)])
    with pytest.raises(WorkloadError, match="x @ x"):
        trace(workload)


class PanicException(BaseException):
    """As pyo3 names what Rust raises."""


@pytest.mark.parametrize("kind", ["comparison", "budget"])
def test_a_panic_at_a_damaged_file_is_bad_input(kind, tmp_path, monkeypatch, capfd):
    def panics(*_args, **_options):
        os.write(2, b"thread '<unnamed>' panicked at core/src/lib.rs")
        raise PanicException("assertion failed: offset + length <= self.length")

    monkeypatch.setattr(pl, "read_parquet", panics)
    monkeypatch.setattr(pl, "read_parquet_metadata", panics)
    (tmp_path / "comparison.json").write_text("{}")
    (tmp_path / "comparison.parquet").write_bytes(b"PAR1")
    load = roundoff.Comparison.load if kind == "comparison" else Budget.load
    place = tmp_path if kind == "comparison" else tmp_path / "comparison.parquet"
    with pytest.raises(RoundoffError, match="offset"):
        load(place)
    assert capfd.readouterr().err == ""


def test_what_others_write_to_standard_error_meanwhile_comes_out(capfd):
    with panics_raised():
        os.write(2, b"from elsewhere\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "from elsewhere\n"


def test_standard_error_comes_back_after_any_exception(capfd):
    with pytest.raises(KeyError), panics_raised():
        os.write(2, b"before\n")
        raise KeyError("x")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"


def test_a_block_within_another_and_no_place_for_a_file(capfd, monkeypatch):
    with panics_raised(), panics_raised():
        os.write(2, b"twice\n")
    assert capfd.readouterr().err == "twice\n"
    with monkeypatch.context() as changed:
        changed.setattr("tempfile.tempdir", "/nowhere/at/all")
        with panics_raised():
            os.write(2, b"at once\n")
        assert capfd.readouterr().err == "at once\n"
