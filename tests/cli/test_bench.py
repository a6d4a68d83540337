"""``roundoff bench``: files, exit codes, messages."""

import json

import pytest

from roundoff.cli.app import main

WORKLOAD = """
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=generator), torch.randint(0, 2, (6,), generator=generator)) for _ in range(3)]

held_out = batches

def forward(model, batch):
    return model(batch[0])

def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])

def optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.1)

def accuracy(outputs, batches):
    return sum((o.argmax(-1) == b[1]).double().mean().item() for o, b in zip(outputs, batches)) / len(batches)

metric = accuracy
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(WORKLOAD)
    return path


def test_bench(file, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main(
            [
                "bench",
                str(file),
                "--configs",
                "fp32,fp32",
                "--steps",
                "5",
                "--seeds",
                "2",
                "-o",
                str(out),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        "No difference from fp32 beyond the noise between seeds is seen in fp32 (2)."
        in printed
    )
    summary = json.loads((out / "summary.json").read_text())
    assert [row["config"] for row in summary["rows"]] == ["fp32", "fp32 (2)"]
    assert len(summary["curves"]["fp32"][0]) == 5
    assert (out / "report.html").exists()


def test_json_and_a_configuration_that_fails(file, tmp_path, capsys):
    options = [
        "--configs",
        "fp32,cuda:77,fp16",
        "--steps",
        "4",
        "--seeds",
        "1",
        "--json",
        "-o",
        str(tmp_path / "o"),
    ]
    assert main(["bench", str(file), *options]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert "there is no device cuda:77 here" in summary["rows"][1]["failed"]


def test_bad_input(file, tmp_path, capsys):
    assert (
        main(["bench", str(file), "--configs", "fp32,bf61", "-o", str(tmp_path / "o")])
        == 2
    )
    assert "did you mean bf16" in capsys.readouterr().err
    file.write_text(WORKLOAD.replace("def optimizer", "def optimiser"))
    assert main(["bench", str(file), "-o", str(tmp_path / "o")]) == 2
    assert "optimizer missing" in capsys.readouterr().err
