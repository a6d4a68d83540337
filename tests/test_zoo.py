"""The networks of examples/zoo load, run, repeat themselves, and are what their page says."""

import re
from pathlib import Path

import pytest
import torch

import roundoff as ro
from roundoff.workload import named_tensors

ROOT = Path(__file__).parent.parent
FILES = {file.stem: file for file in sorted((ROOT / "examples" / "zoo").glob("*.py"))}
ROWS = re.findall(
    r"^\| `(\w+)` \| ([\w -]+) \| (\d+) \|",
    (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)


def load(name: str) -> ro.Workload:
    for package in ("sklearn", "transformers"):
        if package in FILES[name].read_text(encoding="utf-8"):
            pytest.importorskip(package)
    return ro.Workload.load(FILES[name])


def test_the_page_lists_every_file() -> None:
    assert sorted(name for name, _, _ in ROWS) == list(FILES)
    assert len({family for _, family, _ in ROWS}) >= 10


@pytest.mark.filterwarnings("ignore")  # other libraries' deprecations
@pytest.mark.parametrize(("name", "parameters"), [(row[0], row[2]) for row in ROWS])
def test_a_trained_network_gives_finite_outputs(name: str, parameters: str) -> None:
    workload = load(name)
    counted = {id(p): p.numel() for p in workload.model.parameters()}
    assert sum(counted.values()) == int(parameters)
    with torch.no_grad():
        output = workload.run(workload.held_out[0])
    tensors = named_tensors(output)
    values = torch.cat([t.flatten() for t in tensors.values()])
    assert values.isfinite().all()
    assert values.std() > 0


@pytest.mark.filterwarnings("ignore")  # other libraries' deprecations
def test_loading_twice_gives_the_same_weights() -> None:
    first = load("gat").model.state_dict()
    second = load("gat").model.state_dict()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
