"""No traceback reaches a user, whatever a verb raises: one message, a file for a report, exit code 3."""

import re
from pathlib import Path

import pytest

from roundoff.cli.app import main
from roundoff.export.delivery.files import Folder

WORKLOAD = """
import torch

PASSWORD = "hunter2"

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))

def batches():
    return [torch.ones(8, 4), torch.rand(8, 4)]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(WORKLOAD)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def broken(*_args: object, **_kwargs: object) -> None:
    raise IndexError("no such place")


FAULTS = {
    "diagnose net.py -o out": "roundoff.budget.run._columns",
    "quantize net.py -o out --no-onnx": "roundoff.quantize.pipeline.round_model_",
    "compare a b": "roundoff.verbs.compare.compare",
}


@pytest.mark.parametrize("command", FAULTS)
def test_any_verb(
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(FAULTS[command], broken)
    assert main(command.split()) == 3
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.startswith(
        "roundoff: an error that roundoff did not foresee: IndexError: no such place\n"
    )
    (path,) = re.findall(r"report: (\S+) has", error)
    text = Path(path).read_text(encoding="utf-8")
    assert "IndexError: no such place" in text
    assert "hunter2" not in text
    assert not (folder / "out" / "report.html").exists()


def test_the_step_and_the_site(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("roundoff.quantize.graph._reads_integers", None)
    assert main("quantize net.py -o out --no-onnx".split()) == 3
    assert "  where: 0/linear, in quantize\n" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_a_row(folder: Path) -> None:
    files = Folder(folder)
    assert files.write("model.onnx", broken) is None
    reason = files.reasons["model.onnx"]
    assert "did not foresee: IndexError: no such place" in reason
    assert "where: write model.onnx" in reason


REFUSING = """
import torch

class Refusing(torch.nn.Identity):
    def __reduce_ex__(self, protocol):
        raise RuntimeError("not to be pickled")

    def __deepcopy__(self, memo):
        return self
"""


def test_a_model_that_pickle_refuses_has_the_other_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module that refuses to be pickled in its own words, as parametrized ones do."""
    refusing = WORKLOAD.replace(
        "return torch.nn.Sequential(",
        "return torch.nn.Sequential(Refusing(), ",
    )
    (folder / "net.py").write_text(REFUSING + refusing)
    assert main("quantize net.py -o out --no-onnx --no-pareto".split()) == 0
    assert (folder / "out" / "report.html").exists()
    assert not (folder / "out" / "model.pt").exists()
    assert "model.pt" in capsys.readouterr().out
