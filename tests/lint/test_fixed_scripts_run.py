"""A mended example of loss scaling or autocast runs: on the CPU, with a tiny model."""

import warnings

import pytest
import torch

from roundoff.lint import RULES, LintConfig, lint_paths
from roundoff.lint.script import Script

FIXABLE = [
    rule
    for rule in RULES
    if rule.code.startswith(("RO1", "RO2"))
    and any(hit.edits for hit in rule.check(Script(rule.wrong)))
]


def names():
    """What the examples leave out."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(3, 4), torch.tensor([0, 1, 1])
    return {
        "model": model,
        "optimizer": optimizer,
        "criterion": torch.nn.CrossEntropyLoss(),
        "loader": [batch] * 4,
        "x": torch.randn(4, 4),
        "y": torch.randn(4, 4),
    }


@pytest.mark.parametrize("rule", FIXABLE, ids=lambda rule: rule.code)
def test_a_mended_example_runs(rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "script.py"
    file.write_text(rule.wrong)
    result = lint_paths([file], LintConfig(), mend=True)
    text = result.fixed[0].after.replace('"cuda"', '"cpu"')
    # what fp16 loses is not asked here, and few CPUs are quick in it
    text = text.replace("torch.float16", "torch.bfloat16")
    variables = names()
    before = variables["model"].weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "script.py", "exec"), variables)
    trained = not torch.equal(before, variables["model"].weight)
    assert trained == ("step(" in text)
