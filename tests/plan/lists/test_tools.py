"""Paddle, TensorFlow, Apex and MindSpore: settings as their users write them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from roundoff.errors import PlanError
from roundoff.plan.lists.convert import read_lists, write_lists
from roundoff.plan.lists.paddle import BLACK_O2, WHITE
from roundoff.plan.rules import Plan, Rule

PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
# Intel's recipe for SSD-MobileNet in bfloat16
ENVIRONMENT = f"""# mixed precision
export {PREFIX}ALLOWLIST_ADD=BiasAdd,Relu6,Mul,AddV2
export {PREFIX}INFERLIST_REMOVE="BiasAdd,AddV2,Mul"
set {PREFIX}CLEARLIST_REMOVE='Relu6';

UNRELATED=1
"""


def formats(plan: Plan) -> dict[str, str]:
    return {
        pattern.removeprefix("op:"): rule.format
        for rule in plan.rules
        for pattern in rule.sites
    }


def failure(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def text_of(plan: Plan, tool: str, tmp_path: Path, **options: Any) -> str:
    write_lists(plan, tool, tmp_path / "written", **options)
    return (tmp_path / "written").read_text()


# Paddle


def test_paddle_o1(tmp_path: Path) -> None:
    arguments = {
        "level": "O1",
        "dtype": "bfloat16",
        "custom_white_list": ["gelu"],
        "custom_black_list": {"softmax"},
    }
    plan = read_lists(arguments)
    assert plan.autocast == "bf16"
    assert formats(plan) == {"gelu": "bf16", "softmax": "fp32"}
    written = json.loads(text_of(plan, "paddle", tmp_path))
    expected = {
        "level": "O1",
        "dtype": "bfloat16",
        "custom_white_list": ["gelu"],
        "custom_black_list": ["softmax"],
    }
    assert written == expected


def test_paddle_levels(tmp_path: Path) -> None:
    assert read_lists({"level": "O0", "custom_black_list": ["exp"]}).about[
        "left_out"
    ] == ["1 operators of the custom lists: nothing is cast"]
    od = read_lists({"level": "OD", "custom_black_list": ["einsum"]})
    assert (od.autocast, od.default, set(formats(od).values())) == (
        "",
        "fp32",
        {"fp16"},
    )
    assert "conv2d" in formats(od)
    assert "einsum" not in formats(od)
    o2 = read_lists({"level": "O2", "dtype": "float16", "custom_black_list": ["exp"]})
    assert (o2.autocast, o2.default, formats(o2)["exp"], formats(o2)["embedding"]) == (
        "",
        "fp16",
        "fp32",
        "fp32",
    )
    assert read_lists({"enable": False, "level": "O1"}).rules == ()
    for plan in (od, o2, read_lists({"level": "O0"})):
        (tmp_path / "p.json").write_text(text_of(plan, "paddle", tmp_path))
        again = read_lists(tmp_path / "p.json")
        # at least: Paddle's pool2d is maximum and average
        assert formats(plan).items() <= formats(again).items()
        assert (again.default, again.autocast) == (plan.default, plan.autocast)


def test_paddle_toml_and_bad_arguments(tmp_path: Path) -> None:
    (tmp_path / "amp.toml").write_text(
        'level = "O1"\ncustom_black_list = ["reduce_mean"]\nuse_promote = false\n'
    )
    plan = read_lists(tmp_path / "amp.toml")
    assert formats(plan) == {"mean": "fp32"}
    assert "use_promote=False" in plan.about["left_out"][0]
    assert "did you mean custom_white_list?" in failure(
        read_lists, {"level": "O1", "custom_whitelist": []}
    )
    assert "no such level" in failure(read_lists, {"level": "O3"})
    assert "no half-precision format" in failure(
        read_lists, {"level": "O1", "dtype": "float64"}
    )
    both = {"custom_white_list": ["exp"], "custom_black_list": ["exp"]}
    assert "exp (custom_white_list), and exp (custom_black_list)" in failure(
        read_lists, both
    )
    assert "sofmax (nearest: softmax" in failure(
        read_lists, {"custom_black_list": ["sofmax"]}
    )


def test_two_names_of_one_operator_on_two_lists_are_fp32_with_a_note() -> None:
    plan = read_lists(
        {"custom_white_list": ["matmul"], "custom_black_list": ["matmul_v2"]}
    )
    assert formats(plan)["matmul"] == "fp32"
    assert any(
        "both matmul here: taken as fp32" in note for note in plan.about["notes"]
    )


def test_paddles_own_lists_are_those_of_the_installed_version() -> None:
    lists = pytest.importorskip("paddle.amp.amp_lists")
    assert set(WHITE) < lists.white_list()["bfloat16"]["OD"]
    assert set(BLACK_O2) == lists.black_list()["float16"]["O2"]


# TensorFlow


def test_tensorflow_environment(tmp_path: Path) -> None:
    (tmp_path / "amp.env").write_text(ENVIRONMENT)
    plan = read_lists(tmp_path / "amp.env", format="bf16")
    assert formats(plan) == dict.fromkeys(["add", "relu6", "mul"], "bf16")
    assert plan.about["origin"]["op:relu6"] == "Relu6 (line 2, ALLOWLIST_ADD)"
    mapping = {
        **os.environ,
        f"{PREFIX}BLACKLIST_ADD": "Softmax",
        f"{PREFIX}GRAYLIST_REMOVE": "Softmax, Tanh",
    }
    # Tanh is on no list then: TensorFlow leaves such an operator in fp32
    assert formats(read_lists(mapping, tool="tf")) == {
        "softmax": "fp32",
        "tanh": "fp32",
    }


def test_tensorflow_is_written_so_that_no_operator_is_on_two_lists(
    tmp_path: Path,
) -> None:
    plan = Plan(
        (
            Rule("fp32", ("op:softmax",)),
            Rule("fp16", ("op:tanh",)),
            Rule("follow", ("op:exp",)),
        ),
        autocast="fp16",
    )
    lines = dict(
        line.removeprefix(PREFIX).split("=")
        for line in text_of(plan, "tensorflow", tmp_path).splitlines()
    )
    assert lines["DENYLIST_ADD"] == "Softmax"
    assert lines["ALLOWLIST_ADD"] == "Tanh"
    assert lines["INFERLIST_ADD"] == "Exp"
    assert lines["INFERLIST_REMOVE"] == "Softmax,Tanh"
    assert "TF_ENABLE" not in lines
    assert "UNSAFE_FORCE_ALL" in text_of(Plan((), "fp16"), "tf", tmp_path)
    assert read_lists({f"{PREFIX}LEVEL": "unsafe_force_all"}).default == "fp16"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"ALOWLIST_ADD": "Exp"},
            ["unknown variable", f"did you mean {PREFIX}ALLOWLIST_ADD?"],
        ),
        ({"ALLOWLIST_ADD": "BiasAdd|Softmax"}, ["splits a list at commas alone"]),
        (
            {"ALLOWLIST_ADD": "Exp", "DENYLIST_ADD": "Exp"},
            ["Exp (ALLOWLIST_ADD), and Exp (DENYLIST_ADD)"],
        ),
        (
            {"ALLOWLIST_ADD": "Exp", "WHITELIST_REMOVE": "Exp"},
            ["added to a list and removed", "TensorFlow removes last"],
        ),
        ({"DENYLIST_ADD": "SoftMax"}, ["SoftMax (nearest: Softmax"]),
    ],
)
def test_bad_tensorflow_variables(settings: dict[str, str], words: list[str]) -> None:
    message = failure(
        read_lists, {PREFIX + key: value for key, value in settings.items()}
    )
    assert [word for word in words if word not in message] == []


def test_bad_environment_files(tmp_path: Path) -> None:
    file = tmp_path / "amp.env"
    file.write_text(f"\n{PREFIX}DENYLIST_ADD=Exp\n{PREFIX}DENYLIST_ADD=Log\n")
    message = failure(read_lists, file)
    assert "is set twice" in message
    assert "line 3" in message
    assert "line 2" in message
    file.write_text("x = 1\nnonsense\n")
    assert "line 2: not a setting" in failure(read_lists, file)
    assert "not the settings of a tool" in failure(read_lists, {"x": 1})
    assert "a path or a mapping" in failure(read_lists, ["x"])
    assert "no mixlist" in failure(read_lists, {"modify_mixlist": 5})
    assert "not a readable file" in failure(read_lists, tmp_path / "no.json")
    left_out = read_lists(
        {PREFIX + "LEVEL": "TENSOR_CORES_ONLY", PREFIX + "LOG_PATH": "x"}
    ).about["left_out"]
    assert [part.partition(":")[0] for part in left_out] == [
        "LEVEL=TENSOR_CORES_ONLY",
        "LOG_PATH",
    ]


# Apex


@pytest.mark.parametrize(
    ("arguments", "autocast", "default", "rules"),
    [
        ({"opt_level": "O0"}, "", "fp32", {}),
        ({"opt_level": "O1"}, "fp16", "fp32", {}),
        ({"opt_level": "O2"}, "", "fp16", {"batch_norm": "fp32"}),
        ({"opt_level": "O3"}, "", "fp16", {}),
        (
            {"opt_level": "O3", "keep_batchnorm_fp32": "True"},
            "",
            "fp16",
            {"batch_norm": "fp32"},
        ),
        (
            {
                "opt_level": "O2",
                "keep_batchnorm_fp32": False,
                "cast_model_type": torch.bfloat16,
            },
            "",
            "bf16",
            {},
        ),
        ({"opt_level": "O1", "enabled": False}, "", "fp32", {}),
    ],
)
def test_apex(
    tmp_path: Path,
    arguments: dict[str, Any],
    autocast: str,
    default: str,
    rules: dict[str, str],
) -> None:
    plan = read_lists(arguments)
    assert (plan.autocast, plan.default, formats(plan)) == (autocast, default, rules)
    (tmp_path / "apex.json").write_text(text_of(plan, "apex", tmp_path))
    again = read_lists(tmp_path / "apex.json")
    assert (again.rules, again.default, again.autocast) == (
        plan.rules,
        plan.default,
        plan.autocast,
    )


def test_apex_says_what_a_plan_does_not_hold() -> None:
    plan = read_lists(
        {
            "opt_level": "O2",
            "loss_scale": "128.0",
            "num_losses": 2,
            "min_loss_scale": 1.0,
        }
    )
    assert [part.partition("=")[0] for part in plan.about["left_out"]] == [
        "num_losses",
        "min_loss_scale",
        "loss_scale",
        "master_weights",
    ]
    assert "roundoff.LossScaler" in " ".join(plan.about["left_out"])
    assert "loss_scale=dynamic" in read_lists({"opt_level": "O1"}).about["left_out"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"opt_level": "01"}, ["no such opt level", "the letter O"]),
        (
            {"opt_level": "O1", "master_weights": True},
            ["does not go with O1", "use O2 or O3"],
        ),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, ["does not go with O1"]),
        (
            {"opt_level": "O1", "cast_model_type": torch.float16},
            ["does not go with O1"],
        ),
        (
            {"opt_level": "O2", "patch_torch_functions": True},
            ["does not go with O2", "use O1"],
        ),
        ({"opt_level": "O2", "loss_scale": -1}, ["no loss scale"]),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, ["no truth value"]),
        ({"opt_level": "O2", "cast_model_type": "int8"}, ["no such format"]),
        (
            {"opt_level": "O2", "loss_scaling": 2},
            ["unknown argument", "did you mean loss_scale?"],
        ),
    ],
)
def test_bad_apex(arguments: dict[str, Any], words: list[str]) -> None:
    message = failure(read_lists, arguments)
    assert [word for word in words if word not in message] == []


def test_apex_has_lists_for_its_first_level_alone(tmp_path: Path) -> None:
    plan = Plan((Rule("fp32", ("op:exp",)),), autocast="bf16")
    message = failure(write_lists, plan, "apex", tmp_path / "a.json")
    assert "O1 casts to float16 alone" in message
    plan = Plan((Rule("fp32", ("op:exp",)),), default="fp16")
    message = failure(write_lists, plan, "apex", tmp_path / "a.json")
    assert "op:exp → fp32: Apex's levels have no lists" in message


# MindSpore


def test_mindspore() -> None:
    plan = read_lists({"white_list": ["nn.Conv2d", "nn.Dense", "ops.MatMul"]})
    assert (plan.autocast, plan.default) == ("", "fp32")
    assert plan.rules[0] == Rule("fp16", ("class:Conv2d", "class:Linear"))
    assert "op:matmul" in plan.rules[1].sites
    black = read_lists({"black_list": ["nn.BatchNorm2d"], "dtype": "mstype.bfloat16"})
    assert (black.rules, black.default) == (
        (Rule("fp32", ("class:BatchNorm2d",)),),
        "bf16",
    )
    assert "one of white_list and black_list" in failure(
        read_lists, {"white_list": [], "black_list": []}
    )
    assert "nearest" in failure(read_lists, {"white_list": ["ops.MatMull"]})
    # every class is one of torch's
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.Linear(1, 1))
    assert plan.for_model(model).rules[0].sites[0] == "0/*"
