"""Ascend's files as CANN's documentation writes them."""

import json
from pathlib import Path

import pytest

from roundoff.errors import PlanError
from roundoff.plan.lists.convert import read_lists, write_lists
from roundoff.plan.lists.fold import MATRIX
from roundoff.plan.rules import Plan, Rule

LIBRARY = {
    "Conv2D": {"precision_reduce": {"flag": "true"}, "input0": {"name": "x"}},
    "MatMulV2": {"precision_reduce": {"flag": "true"}},
    "SoftmaxV2": {"precision_reduce": {"flag": "false"}},
    "ReduceSumD": {"precision_reduce": {"flag": "false"}},
    "Gelu": {"op": {"pattern": "formatAgnostic"}},
    "YoloV3DetectionOutput": {"precision_reduce": {"flag": "false"}},
}
# The shape of the sample in the documentation of --modify_mixlist, comments included.
SAMPLE = """{
  "black-list": {                  // Blocklist
     "to-remove": [                // moves to the graylist
     "Exp"
     ],
     "to-add": [
     "SoftmaxV2"
     ]
  },
  "white-list": {                  // Trustlist
     "to-remove": ["Conv2D"],
     "to-add": ["BiasAdd"]
  }
}
"""


def formats(plan: Plan) -> dict[str, str]:
    return {
        pattern.removeprefix("op:"): rule.format
        for rule in plan.rules
        for pattern in rule.sites
    }


def failure(call: object, *arguments: object, **options: object) -> str:
    with pytest.raises(PlanError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def test_the_sample_without_its_comments(tmp_path: Path) -> None:
    file = tmp_path / "ops_info.json"
    file.write_text("\n".join(line.partition("//")[0] for line in SAMPLE.splitlines()))
    plan = read_lists(file)
    assert plan.autocast == "fp16"
    gray = dict.fromkeys(["exp", "conv1d", "conv2d", "conv_tbc"], "follow")
    expected = {"softmax": "fp32", "add": "fp16"} | gray
    assert formats(plan) == expected
    assert plan.about["origin"]["op:softmax"] == "SoftmaxV2 (line 7, black-list to-add)"
    assert "add here is more than BiasAdd: also Add, AddV2, AddN" in plan.about["notes"]
    assert any("does not say the format" in note for note in plan.about["notes"])
    assert read_lists(file, format="bf16").autocast == "bf16"


def test_comments_are_named_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "ops_info.json").write_text(SAMPLE)
    message = failure(read_lists, tmp_path / "ops_info.json")
    assert message.startswith(
        f"{tmp_path / 'ops_info.json'}, line 2: JSON has no comments"
    )
    assert "comments at lines 2, 3, 10 (samples in Ascend's documentation" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"black-list": {"to-add": ["MatMul"],}}', ["not JSON", "line 1", "commas"]),
        ('{"black-list": {"to-add": [A]}}', ["not JSON", "line 1"]),
        ("", ["not JSON", "nothing"]),
        (
            '{"black-list": {}, "gray-list": {}}',
            ["unknown setting: gray-list", "line 1", "black-list, white-list"],
        ),
        (
            '{"black-list": {"to-ad": []}}',
            ["unknown setting: to-ad", "did you mean to-add?"],
        ),
        ('{"black-list": []}', ["not a list's edits", "black-list"]),
        ('{"black-list": {"to-add": "MatMul"}}', ["not a list of names", "to-add"]),
        (
            '{"black-list":\n {"to-add":\n ["Matmul",\n "Yolo"]}}',
            [
                "2 operators",
                "line 3, black-list to-add: Matmul (nearest: MatMul",
                "line 4, black-list to-add: Yolo",
            ],
        ),
        (
            '{"black-list": {"to-add": ["MatMul"]},\n"white-list": {"to-add": ["MatMul"]}}',
            [
                "MatMul is on two lists that contradict",
                "(line 1, black-list to-add), and MatMul (line 2, white-list to-add)",
            ],
        ),
        (
            '{"black-list": {"to-add": ["Exp"],\n"to-remove": ["Exp"]}}',
            [
                "Exp is on two lists that contradict",
                "black-list to-add, line 1 and black-list to-remove, line 2",
            ],
        ),
        (
            '{"black-list": {"to-remove": ["Exp"]},\n"white-list": {"to-remove": ["Exp"]}}',
            ["Exp is on two lists"],
        ),
        (
            '{"black-list": {},\n"black-list": {}}',
            ['"black-list" comes twice', "line 2", "line 1"],
        ),
    ],
)
def test_bad_mixlists(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "ops_info.json").write_text(text)
    message = failure(read_lists, tmp_path / "ops_info.json", tool="ascend")
    assert [word for word in words if word not in message] == []
    assert str(tmp_path / "ops_info.json") in message


def test_unknown_operators_are_left_out_on_request() -> None:
    plan = read_lists(
        {"black-list": {"to-add": ["Yolo", "Exp", "SoftmaxGrad"]}}, partial=True
    )
    assert formats(plan) == {"exp": "fp32"}
    yolo, gradient = plan.about["left_out"]
    assert yolo == "Yolo (black-list to-add): not in the table of names"
    assert "a gradient runs in the format of its forward call, softmax" in gradient


def test_added_to_black_and_taken_off_white_is_black() -> None:
    # the documentation's second right way to move an operator
    plan = read_lists(
        {
            "black-list": {"to-add": ["SoftmaxV2"]},
            "white-list": {"to-remove": ["SoftmaxV2"]},
        }
    )
    assert formats(plan) == {"softmax": "fp32"}


def test_the_installed_library_is_a_whole_policy() -> None:
    plan = read_lists(LIBRARY, format="bf16")
    found = formats(plan)
    assert (found["conv2d"], found["softmax"], found["sum"], found["gelu"]) == (
        "bf16",
        "fp32",
        "fp32",
        "follow",
    )
    assert plan.about["left_out"] == [
        "1 operators of the library without a name here: YoloV3DetectionOutput"
    ]
    both = {
        "Exp": {
            "precision_reduce": {"flag": "true"},
            "precision_reduce_bf16": {"flag": "false"},
        }
    }
    assert formats(read_lists(both, format="bf16")) == {"exp": "fp32"}
    assert formats(read_lists(both, format="fp16")) == {"exp": "fp16"}
    assert "no such flag" in failure(
        read_lists, {"Exp": {"precision_reduce": {"flag": "maybe"}}}
    )


def test_edits_of_a_library() -> None:
    edits = {"black-list": {"to-add": ["Conv2D"], "to-remove": ["SoftmaxV2"]}}
    found = formats(read_lists(edits, base=LIBRARY))
    assert (found["conv2d"], found["softmax"], found["sum"], found["linear"]) == (
        "fp32",
        "follow",
        "fp32",
        "fp16",
    )
    message = failure(
        read_lists, {"white-list": {"to-remove": ["SoftmaxV2"]}}, base=LIBRARY
    )
    assert "SoftmaxV2 cannot be taken off the white-list: it is not on it" in message
    assert "its list in the library: black-list" in message
    message = failure(read_lists, {"black-list": {"to-remove": ["Exp"]}}, base=LIBRARY)
    assert "none: it is not there" in message
    assert "not an operator library" in failure(read_lists, edits, base=edits)


@pytest.mark.parametrize(
    ("key", "mode", "autocast", "default", "matrix"),
    [
        ("precision_mode", "force_fp16", "", "fp16", None),
        ("precision_mode", "force_fp32", "", "fp32", "tf32"),
        ("precision_mode", "cube_fp16in_fp32out", "", "fp32", "tf32"),
        ("precision_mode", "allow_fp32_to_fp16", "", "fp32", "fp16"),
        ("precision_mode", "allow_fp32_to_bf16", "", "fp32", "bf16"),
        ("precision_mode", "must_keep_origin_dtype", "", "fp32", None),
        ("precision_mode", "allow_mix_precision", "fp16", "fp32", None),
        ("precision_mode", "allow_mix_precision_fp16", "fp16", "fp32", None),
        ("precision_mode", "allow_mix_precision_bf16", "bf16", "fp32", None),
        (
            "precision_mode",
            "allow_mix_precison_bf16",
            "bf16",
            "fp32",
            None,
        ),  # the documentation's misspelling
        ("precision_mode_v2", "fp16", "", "fp16", None),
        ("precision_mode_v2", "origin", "", "fp32", None),
        ("precision_mode_v2", "cube_fp16in_fp32out", "", "fp32", "tf32"),
        ("precision_mode_v2", "mixed_float16", "fp16", "fp32", None),
        ("precision_mode_v2", "mixed_bfloat16", "bf16", "fp32", None),
        ("precision_mode_v2", "mixed_hif8", "bf16", "fp32", "hif8"),
        ("precision_mode_v2", "cube_hif8", "", "fp32", "hif8"),
    ],
)
def test_every_mode(
    tmp_path: Path, key: str, mode: str, autocast: str, default: str, matrix: str | None
) -> None:
    plan = read_lists({key: mode})
    assert (plan.autocast, plan.default) == (autocast, default)
    assert formats(plan) == (dict.fromkeys(MATRIX, matrix) if matrix else {})
    # written and read again it is the same plan
    file = tmp_path / "ops_info.json"
    use = write_lists(plan, "ascend", file).use
    written = json.loads(file.read_text())
    if autocast:
        name, value = use.split()[0].removeprefix("--").split("=")
        again = read_lists({name: value, "modify_mixlist": written})
    else:
        again = read_lists(file)
    assert (again.rules, again.autocast, again.default) == (
        plan.rules,
        plan.autocast,
        plan.default,
    )


def test_modes_and_lists_together(tmp_path: Path) -> None:
    (tmp_path / "ops_info.json").write_text('{"black-list": {"to-add": ["Exp"]}}')
    (tmp_path / "options.json").write_text(
        '{"precision_mode_v2": "mixed_bfloat16", "modify_mixlist": "ops_info.json"}'
    )
    plan = read_lists(tmp_path / "options.json")
    assert (plan.autocast, formats(plan)) == ("bf16", {"exp": "fp32"})
    both = {"precision_mode": "force_fp16", "precision_mode_v2": "fp16"}
    assert "exclude each other" in failure(read_lists, both)
    message = failure(
        read_lists,
        {"precision_mode_v2": "origin", "modify_mixlist": {"black-list": {}}},
    )
    assert "origin has no lists to modify" in message
    message = failure(read_lists, {"precision_mode_v2": "mixed_fp16"})
    assert "unknown precision_mode_v2 mode: mixed_fp16" in message
    assert "did you mean mixed_float16?" in message
    assert "misspelling" in " ".join(
        read_lists({"precision_mode": "allow_mix_precison_bf16"}).about["notes"]
    )


def test_writing(tmp_path: Path) -> None:
    rules = (
        Rule("fp32", ("op:softmax",)),
        Rule("bf16", ("op:layer_norm",)),
        Rule("follow", ("op:gelu",)),
    )
    plan = Plan(rules, autocast="bf16")
    file = tmp_path / "ops_info.json"
    message = failure(write_lists, plan, "ascend", file)
    assert (
        "op:gelu → follow: only an operator on a list can be taken off it; give base="
        in message
    )
    assert not file.exists()
    base = LIBRARY | {"Gelu": {"precision_reduce": {"flag": "true"}}, "LayerNorm": {}}
    written = write_lists(plan, "ascend", file, base=base)
    assert written.use == f"--precision_mode_v2=mixed_bfloat16 --modify_mixlist={file}"
    # softmax is black in the library already; only what differs is written, and only types that the library has
    expected = {"white-list": {"to-add": ["LayerNorm"], "to-remove": ["Gelu"]}}
    assert json.loads(file.read_text()) == expected
    assert "none of its types is in the library" in failure(
        write_lists,
        Plan((Rule("fp32", ("op:exp",)),), autocast="bf16"),
        "ascend",
        file,
        base=base,
    )


def test_what_ascend_cannot_say_is_listed(tmp_path: Path) -> None:
    rules = (
        Rule("fp32", ("head.*", "class:LayerNorm")),
        Rule("int8", ("op:linear",)),
        Rule("fp32", ("op:exp", "op:outer")),
    )
    plan = Plan(rules, autocast="bf16")
    message = failure(write_lists, plan, "ascend", tmp_path / "o.json")
    assert "4 parts of the plan cannot be said to ascend" in message
    for part in (
        "rule 1, head.* → fp32: not an operator type",
        "rule 1, class:LayerNorm",
        "op:linear → int8: the lists have no",
        "op:outer → fp32: no name in cann",
    ):
        assert part in message
    written = write_lists(plan, "ascend", tmp_path / "o.json", partial=True)
    assert len(written.left_out) == 4
    assert json.loads((tmp_path / "o.json").read_text()) == {
        "black-list": {"to-add": ["Exp"]}
    }


def test_two_operators_that_are_one_there(tmp_path: Path) -> None:
    plan = Plan(
        (Rule("fp32", ("op:linear",)), Rule("bf16", ("op:mm",))), autocast="bf16"
    )
    message = failure(write_lists, plan, "ascend", tmp_path / "o.json")
    assert "op:mm → bf16: it is MatMul there, as op:linear → fp32" in message
    alone = Plan(plan.rules[:1], autocast="bf16")
    notes = write_lists(alone, "ascend", tmp_path / "o.json").notes
    assert any(
        note.startswith("MatMul is also matmul,")
        and note.endswith("they become fp32 too")
        for note in notes
    )
