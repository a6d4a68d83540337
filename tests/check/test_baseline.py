"""A script that does not repeat itself: why, and whose ``--repeat`` it is."""

from __future__ import annotations

import json

import pytest

from roundoff.cli.app import main

HEAD = "import os, sys, torch\n"
TAIL = """
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(2):
    loss = (weight * data).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
#: Adds bytes of the system to what it reads, unseen by torch's generator.
OWN = """
@torch.library.custom_op("check_baseline::shaken", mutates_args=())
def shaken(x: torch.Tensor) -> torch.Tensor:
    return x + int.from_bytes(os.urandom(4), "big") / 2**32
torch.manual_seed(0)
data = shaken(torch.rand(4))
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "torch.seed()\ndata = torch.nn.functional.dropout(torch.ones(64))[:4]"
            " + torch.rand(4)",
            "unseeded",
        ),
        ("data = torch.tensor(list(os.urandom(4))).float()", "unseeded"),
        (OWN, "race"),
    ],
    ids=["dropout", "data", "own operator"],
)
def test_why_a_script_does_not_repeat_itself(text, kind, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(f"{HEAD}{text}{TAIL}")
    words = ["check", "--baseline", "--repeat", "2", "--steps", "0", "--json"]
    code = main([*words, "--", str(script)])
    answer = json.loads(capsys.readouterr().out)
    assert (code, answer["kind"]) == (1, kind)


def test_what_follows_the_script_is_its_own(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        f"{HEAD}assert sys.argv[1:] == ['--repeat', '5']\ntorch.manual_seed(0)\n"
        f"data = torch.rand(4){TAIL}"
    )
    words = ["check", "--baseline", "--repeat", "2", "--steps", "0", "--json"]
    assert main([*words, "--", str(script), "--repeat", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 2
