"""What the README shows runs: its workload file, its commands, its Python, and the sentences of its demo."""

import re
import shlex
from pathlib import Path

import pytest

from roundoff.cli.app import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_workload.py").write_text(PYTHON[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands(folder: Path) -> None:
    lines = [line for line in README.splitlines() if line.startswith("roundoff ")]
    commands = [
        shlex.split(line, comments=True)[1:]
        for line in lines
        if "my_workload" in line or "budget.parquet" in line
    ]
    assert len(commands) == 7
    for arguments in commands:
        # an untrained network need not reach its target: both verdicts are answers, bad input is not
        assert main(arguments) in (0, 1), arguments
    assert {"budget.parquet", "plan.toml", "out"} <= {
        path.name for path in folder.iterdir()
    }


def test_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(PYTHON[1], names)
    printed = capsys.readouterr().out.splitlines()[-1].split()
    assert printed[-1] == "True"
    assert float(printed[1]) >= 40.0
    exec(PYTHON[-1], names)  # quantizes the same workload
    assert float(capsys.readouterr().out.split()[0]) > 30


def test_links_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 5
    assert [
        link
        for link in links
        if not link.startswith("http") and not (ROOT / link).exists()
    ] == []
