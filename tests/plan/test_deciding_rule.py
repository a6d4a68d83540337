"""Which rule decides a site, and where it stands."""

from pathlib import Path

import pytest
from torch import nn

from roundoff.errors import PatternError, PlanError
from roundoff.plan.deciding_rule import explain, lines
from roundoff.plan.rules import Plan, Rule

PLAN = Plan(
    (
        Rule("fp32", ("head/linear", "op:softmax")),
        Rule("follow", ("op:gelu",)),
        Rule("fp32", ("class:LayerNorm",)),
    ),
    autocast="bf16",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_the_line_of_the_pattern(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"plan{suffix}"
    PLAN.save(file)
    text = file.read_text().splitlines()
    found = lines(file)
    assert set(found) >= {
        (1, "head/linear"),
        (1, "op:softmax"),
        (2, "op:gelu"),
        (3, "class:LayerNorm"),
    }
    for (_, pattern), line in found.items():
        assert f'"{pattern}"' in text[line - 1]
    (decision,) = explain(
        Plan(PLAN.rules[:2], autocast="bf16"), ["a/softmax"], file=file
    )
    assert decision.why == f"rule 1, op:softmax ({file}, line {found[1, 'op:softmax']})"


def test_decisions_agree_with_the_plan() -> None:
    plan = Plan(
        (Rule("fp16", ("a/linear",)), Rule("bf16", ("a/*",)), Rule("int8", ("*/mul",)))
    )
    sites = ["a/linear", "a/add", "b/mul", "b/add"]
    found = explain(plan, sites)
    assert [d.format for d in found] == [plan.format_of(site) for site in sites]
    assert [d.rule for d in found] == [1, 2, 3, None]
    assert found[-1].why == "no rule: the plan's default"
    assert found[0].listed == {}


def test_what_autocast_says_on_each_device() -> None:
    plan = Plan(PLAN.rules[:2], autocast="bf16")
    sites = ["x/layer_norm", "x/linear", "x/gelu", "op:softmax", "op:linear", "x/cat#1"]
    found = {d.site: d for d in explain(plan, sites)}
    assert found["x/layer_norm"].listed == {"cpu": "follow", "cuda": "fp32"}
    assert found["x/layer_norm"].format == "the format of its inputs"
    assert explain(plan, ["x/layer_norm"], device="cuda")[0].format == "fp32"
    assert found["x/linear"].format == "bf16"
    assert (found["x/gelu"].rule, found["x/gelu"].format) == (
        2,
        "the widest format of its inputs",
    )
    assert (found["op:softmax"].rule, found["op:softmax"].format) == (1, "fp32")
    assert (
        found["op:linear"].rule is None
    )  # a rule over a module says nothing of the operator
    assert found["x/cat#1"].format == "the widest format of its inputs"


def test_classes_need_the_model() -> None:
    with pytest.raises(PlanError, match="--workload WORKLOAD.py"):
        explain(PLAN, ["norm/layer_norm"])
    (decision,) = explain(PLAN, ["norm/layer_norm"], model=Net())
    assert (decision.rule, decision.pattern, decision.format) == (
        3,
        "class:LayerNorm",
        "fp32",
    )
    with pytest.raises(PatternError, match="the model has no module 'nrom'") as caught:
        explain(PLAN, ["nrom/layer_norm"], model=Net())
    assert "norm" in (caught.value.expected or "")
    with pytest.raises(PatternError, match="no parameter"):
        explain(PLAN, ["head.wieght"], model=Net())
    with pytest.raises(PlanError, match="no autocast on such a device"):
        explain(PLAN, ["norm/linear"], model=Net(), device="tpu")


def test_an_operator_that_the_model_does_not_call() -> None:
    called = ["norm/layer_norm", "head/linear"]
    sites = ["head/linear", "op:softmax", "head.weight"]
    explained = explain(Plan(()), sites, model=Net(), called=called)
    assert [decision.site for decision in explained] == sites
    with pytest.raises(PatternError, match="does not call 'head/liner'") as caught:
        explain(Plan(()), ["head/liner"], model=Net(), called=called)
    assert caught.value.do == "did you mean head/linear?"
