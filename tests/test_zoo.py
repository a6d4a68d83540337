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


#: A loop over numbers, which is how the networks are trained.
LOOP = re.compile(r"(for \w+ in range)\((\d+)\):")


def load(name: str, folder: Path) -> ro.Workload:
    """Load it, trained for a fifth of its steps: whole, they are for benchmarks."""
    text = FILES[name].read_text(encoding="utf-8")
    for package in ("sklearn", "transformers"):
        if package in text:
            pytest.importorskip(package)
    before, model, after = text.partition("\ndef model(")
    training, end, rest = after.partition("\n\n\n")
    shorter, loops = LOOP.subn(fifth, training)
    assert loops == 1
    file = folder / f"{name}.py"
    file.write_text(before + model + shorter + end + rest, encoding="utf-8")
    return ro.Workload.load(file)


def fifth(loop: re.Match[str]) -> str:
    return f"{loop[1]}({-(-int(loop[2]) // 5)}):"


def test_the_page_lists_every_file() -> None:
    assert sorted(name for name, _, _ in ROWS) == list(FILES)
    assert len({family for _, family, _ in ROWS}) >= 10


@pytest.mark.filterwarnings("ignore")  # other libraries' deprecations
@pytest.mark.parametrize(("name", "parameters"), [(row[0], row[2]) for row in ROWS])
def test_a_trained_network_gives_finite_outputs(
    name: str, parameters: str, tmp_path: Path
) -> None:
    workload = load(name, tmp_path)
    counted = {id(p): p.numel() for p in workload.model.parameters()}
    assert sum(counted.values()) == int(parameters)
    with torch.no_grad():
        output = workload.run(workload.held_out[0])
    tensors = named_tensors(output)
    values = torch.cat([t.flatten() for t in tensors.values()])
    assert values.isfinite().all()
    assert values.std() > 0


@pytest.mark.filterwarnings("ignore")  # other libraries' deprecations
def test_loading_twice_gives_the_same_weights(tmp_path: Path) -> None:
    first = load("gat", tmp_path).model.state_dict()
    second = load("gat", tmp_path).model.state_dict()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
