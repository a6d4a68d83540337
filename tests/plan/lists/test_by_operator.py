"""A plan that was chosen by operator type, as each tool's lists and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundoff.errors import PlanError
from roundoff.ops.foreign_names import translate
from roundoff.plan.lists.convert import read_lists, write_lists
from roundoff.plan.rules import Plan, Rule

SYSTEMS = {"ascend": "cann", "paddle": "paddle", "tensorflow": "tensorflow"}
FILES = {
    "ascend": "mix.json",
    "paddle": "amp.json",
    "tensorflow": "amp.env",
    "apex": "apex.json",
}


def by_operator(low: str = "fp16", **about: object) -> Plan:
    rules = (
        Rule(low, ("op:linear", "op:conv2d", "op:gelu")),
        Rule("fp32", ("op:softmax", "op:layer_norm", "op:exp")),
    )
    return Plan(rules, about={"tie": "operator", **about})


def formats(plan: Plan) -> dict[str, str]:
    return {
        pattern.removeprefix("op:"): rule.format
        for rule in plan.rules
        for pattern in rule.sites
    }


@pytest.mark.parametrize("tool", sorted(FILES))
def test_written_and_read_it_says_the_same(tmp_path: Path, tool: str) -> None:
    plan = by_operator()
    file = tmp_path / FILES[tool]
    written = write_lists(plan, tool, file)
    assert written.left_out == []
    again = read_lists(file, tool=tool, format="fp16")
    said = formats(again)
    by_default = again.default if not again.autocast else "nothing"
    assert {name: said.get(name, by_default) for name in formats(plan)} == formats(plan)
    # written again, the same file: nothing is lost on the way
    second = tmp_path / f"again-{FILES[tool]}"
    write_lists(again, tool, second, partial=True)
    assert read_lists(second, tool=tool, format="fp16").rules == again.rules


@pytest.mark.parametrize("tool", sorted(SYSTEMS))
def test_every_name_of_an_operator_is_on_its_list(tmp_path: Path, tool: str) -> None:
    file = tmp_path / FILES[tool]
    write_lists(by_operator("bf16"), tool, file)
    text = file.read_text()
    for operator in ("gelu", "softmax"):
        names = translate(operator, "torch", SYSTEMS[tool])
        assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("tool", ["ascend", "tensorflow", "apex"])
def test_others_are_left_to_the_tool_and_that_is_said(
    tmp_path: Path, tool: str
) -> None:
    notes = write_lists(by_operator(), tool, tmp_path / FILES[tool]).notes
    assert f"others follow {tool}'s own lists" in " ".join(notes)


def test_a_plan_by_site_is_still_refused(tmp_path: Path) -> None:
    plan = Plan((Rule("bf16", ("a/linear", "b/linear")),))
    for tool in FILES:
        with pytest.raises(PlanError, match="not an operator type"):
            write_lists(plan, tool, tmp_path / FILES[tool])


def test_a_default_of_fp32_that_the_plan_means_is_not_given_up(tmp_path: Path) -> None:
    # no tie: the plan may name some operators only, and all others are to be fp32
    plan = Plan((Rule("fp16", ("op:linear",)),))
    for tool in ("ascend", "tensorflow", "apex"):
        with pytest.raises(PlanError, match="cannot be said"):
            write_lists(plan, tool, tmp_path / FILES[tool])


@pytest.mark.parametrize(
    ("tool", "operator", "words"),
    [
        ("ascend", "einsum_of_ours", "no name in cann"),
        ("tensorflow", "rms_norm", "no name in tensorflow"),
        ("apex", "nll_loss_nd", "no function of torch that Apex can patch"),
    ],
)
def test_operators_without_a_name_are_listed(
    tmp_path: Path, tool: str, operator: str, words: str
) -> None:
    plan = Plan(
        (Rule("fp16", ("op:linear",)), Rule("fp32", (f"op:{operator}",))),
        about={"tie": "operator"},
    )
    with pytest.raises(PlanError, match=words):
        write_lists(plan, tool, tmp_path / FILES[tool])
    left_out = write_lists(plan, tool, tmp_path / FILES[tool], partial=True).left_out
    assert [part for part in left_out if operator in part and words in part]


def test_no_half_precision_at_all(tmp_path: Path) -> None:
    plan = Plan((Rule("fp32", ("op:linear",)),), about={"tie": "operator"})
    write_lists(plan, "ascend", tmp_path / "mix.json")
    assert read_lists(tmp_path / "mix.json").default == "fp32"
    write_lists(plan, "apex", tmp_path / "apex.json")
    assert read_lists(tmp_path / "apex.json").default == "fp32"


def test_formats_that_lists_do_not_have(tmp_path: Path) -> None:
    plan = Plan(
        (Rule("fp16", ("op:linear",)), Rule("int8", ("op:matmul",))),
        about={"tie": "operator"},
    )
    with pytest.raises(PlanError, match="op:matmul → int8"):
        write_lists(plan, "ascend", tmp_path / "mix.json")


def test_functions_that_apex_registers(tmp_path: Path) -> None:
    plan = read_lists(
        {
            "opt_level": "O1",
            "register_float_function": ["torch.softmax", "torch.Tensor.exp"],
            "register_half_function": ["torch.nn.functional.gelu"],
            "register_promote_function": ["torch.Tensor.__add__"],
        }
    )
    assert formats(plan) == {
        "softmax": "fp32",
        "exp": "fp32",
        "gelu": "fp16",
        "add": "follow",
    }
    written = write_lists(plan, "apex", tmp_path / "apex.json")
    assert "register_" in written.use
    assert formats(read_lists(tmp_path / "apex.json")) == formats(plan)


def test_a_function_that_torch_does_not_have() -> None:
    arguments = {"opt_level": "O1", "register_half_function": ["torch.sofmax"]}
    with pytest.raises(PlanError, match="softmax"):
        read_lists(arguments)
    assert formats(read_lists(arguments, partial=True)) == {}


def test_registered_functions_under_a_level_without_patches() -> None:
    plan = read_lists({"opt_level": "O2", "register_float_function": ["torch.exp"]})
    assert "O2 patches no functions" in " ".join(plan.about["left_out"])
