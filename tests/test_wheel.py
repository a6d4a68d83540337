"""The built wheel, alone with what it declares: nothing of this checkout, no undeclared dependency."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


WORKLOAD = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))

def batches():
    return [torch.randn(8, 4, generator=torch.Generator().manual_seed(0))]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=300, cwd=folder)
    (file,) = folder.glob("roundoff-*.whl")
    return file


def declared(requirements: list[str], seen: dict[str, importlib.metadata.Distribution]):
    """Every installed distribution that the requirements lead to, extras left out."""
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": ""}):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name in seen:
            continue
        seen[name] = importlib.metadata.distribution(name)
        declared(seen[name].requires or [], seen)
    return seen


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A folder with the wheel and links to the files of its dependencies."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (metadata,) = site.glob("roundoff-*.dist-info")
    own = importlib.metadata.PathDistribution(metadata)
    for distribution in declared(own.requires or [], {}).values():
        tops = {file.parts[0] for file in distribution.files or () if file.parts}
        for top in tops - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return site


def run(site: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        # -S: no site-packages, so only the folder of the fixture is there
        [sys.executable, "-S", *arguments],
        env=variables | {"PYTHONPATH": str(site)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_it_holds_what_is_needed_and_nothing_of_this_machine(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for path in (ROOT / "src").rglob("*.py*"):
        if path.suffix in (".py", ".pyi"):
            assert str(path.relative_to(ROOT / "src")) in names
    assert "roundoff/record/kernels.cpp" in names
    assert "roundoff/py.typed" in names
    assert not [name for name in names if "test" in name.lower()]


def test_it_diagnoses_a_model(environment, tmp_path):
    (tmp_path / "workload.py").write_text(WORKLOAD)
    code = "import roundoff; print(roundoff.__file__)"
    assert str(environment) in run(environment, "-c", code, folder=tmp_path).stdout
    done = run(
        environment,
        *"-m roundoff diagnose workload.py --formats bf16,int8 --json".split(),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert '"measured_db"' in done.stdout


def test_what_an_extra_brings_is_named_where_it_is_missing(environment, tmp_path):
    (tmp_path / "workload.py").write_text(WORKLOAD)
    arguments = "-m roundoff quantize workload.py --formats int8 -o out".split()
    done = run(environment, *arguments, folder=tmp_path)
    assert "roundoff[onnx]" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
