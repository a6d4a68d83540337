"""Transformer Engine's debug YAML: the samples of its documentation over a small model."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from roundoff.errors import PlanError
from roundoff.plan.lists.convert import read_lists, write_lists
from roundoff.plan.rules import Plan, Rule

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
LAYERS = [
    "decoder.layers.0.fc1",
    "decoder.layers.0.fc2",
    "decoder.layers.1.fc1",
    "decoder.layers.1.fc2",
    "head",
]
# docs/config_file.md and examples/configs of nvidia-dlfw-inspect
SAMPLE = r"""
fc1_manipulation:
  enabled: True
  layers:
    layer_name_regex_pattern: .*(fc1)  # ends in fc1
  transformer_engine:
    DisableFp8Gemm:
      enabled: True
      gemms: [fprop]
    PerTensorScaling:
      enabled: True
      gemms: [dgrad]
      tensors: [gradient]
fc2_manipulation:
  enabled: True
  layers:
    layer_types: [fc2]
  transformer_engine:
    FakeQuant:
      enabled: True
      quant_format: FP8E5M2
      gemms_struct:
        - gemm: fprop
          tensors: [activation, weight]
        - gemm: dgrad
          tensors: [gradient]
unused:
  enabled: False
  layers:
    layer_name_regex_pattern: .*
  transformer_engine:
    DisableFP8Layer:
      enabled: True
"""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = (
            nn.Linear(4, 8),
            nn.Linear(8, 4),
            nn.LayerNorm(4),
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 2)


def section(**features: Any) -> dict[str, Any]:
    return {
        "s": {
            "enabled": True,
            "layers": {"layer_types": ["fc1"]},
            "transformer_engine": features,
        }
    }


def failure(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        call(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("model", [Net(), LAYERS], ids=["model", "names"])
def test_the_documented_sample(tmp_path: Path, model: Any) -> None:
    (tmp_path / "te.yaml").write_text(SAMPLE)
    plan = read_lists(tmp_path / "te.yaml", model=model)
    assert plan.autocast == "bf16"
    assert plan.rules == (
        Rule("bf16", ("decoder.layers.0.fc1/*", "decoder.layers.1.fc1/*")),
        Rule("fp8_e5m2", ("decoder.layers.0.fc2/*", "decoder.layers.1.fc2/*")),
        Rule("fp8_e4m3fn", ("op:linear",)),
    )
    left_out = "\n".join(plan.about["left_out"])
    assert "DisableFp8Gemm: dgrad, wgrad stay in fp8 there" in left_out
    assert "PerTensorScaling: how the scale is found" in left_out
    assert "FakeQuant: wgrad stay in fp8 there" in left_out
    assert "unused: not enabled" in plan.about["notes"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"layer_name_regex_pattern": "head"}, ["head"]),
        ({"layer_types": ["all"]}, LAYERS),
        ({"layer_numbers": [1]}, LAYERS[2:4]),
        ({"layer_numbers": ["0-1"], "layer_types": ["fc2"]}, [LAYERS[1], LAYERS[3]]),
        ({"exact_layer_names": ["head"]}, ["head"]),
    ],
)
def test_how_layers_are_named(layers: dict[str, Any], expected: list[str]) -> None:
    data = section(DisableQuantizationLayer={"enabled": True})
    data["s"]["layers"] = layers
    assert read_lists(data, model=Net()).rules[0].sites == tuple(
        f"{name}/*" for name in expected
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            section(DisableFP8Gem={"enabled": True}),
            ["unknown feature: DisableFP8Gem", "did you mean DisableFP8GEMM?"],
        ),
        (
            section(
                FakeQuant={"enabled": True, "gemms": ["fprop"], "quant_format": "FP6"}
            ),
            ["no such quant_format", "FP6"],
        ),
        (
            {"s": {"enabled": True, "layers": {"layer_types": ["fc7"]}}},
            ["no layer of the model matches", "fc7", "5 layers"],
        ),
        (
            {"s": {"enabled": True, "layers": {"layer_type": ["fc1"]}}},
            ["unknown setting: layer_type", "layer_types?"],
        ),
        (
            {"s": {"enabled": True, "layers": {"layer_name_regex_pattern": "("}}},
            ["not a regular expression"],
        ),
        ({"s": {"layers": {"layer_types": ["fc1"]}}}, ["not a section"]),
        (
            section(DisableFP8GEMM={"enabled": True, "gemms": "fprop"}),
            ["not a list of names", "DisableFP8GEMM, gemms"],
        ),
        (
            section(DisableFP8GEMM={"enabled": True, "gemms_struct": ["fprop"]}),
            ["no gemms_struct"],
        ),
        (
            section() | {"t": section()["s"]},
            ["the layer decoder.layers.0.fc1 is in two sections", "s and t"],
        ),
    ],
)
def test_bad_files(data: dict[str, Any], words: list[str]) -> None:
    message = failure(read_lists, data, model=Net(), tool="te")
    assert [word for word in words if word not in message] == []


def test_gradients_only_are_left_out() -> None:
    plan = read_lists(
        section(DisableFP8GEMM={"enabled": True, "gemms": ["dgrad", "wgrad"]}),
        model=Net(),
    )
    assert plan.rules == (Rule("fp8_e4m3fn", ("op:linear",)),)
    assert "dgrad, wgrad gemms only" in plan.about["left_out"][0]


def test_the_model_is_needed() -> None:
    assert "--model WORKLOAD.py" in failure(
        read_lists, section(DisableFP8Layer={"enabled": True})
    )


def test_yaml_that_is_missing_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "te.yaml").write_text("a:\n  b: [1\nc: 2\n")
    assert "not YAML" in failure(read_lists, tmp_path / "te.yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install 'roundoff[yaml]'" in failure(read_lists, tmp_path / "te.yaml")


def test_written_and_read_again(tmp_path: Path) -> None:
    rules = (
        Rule("bf16", ("decoder.layers.0.*",)),
        Rule("mxfp8_e4m3", ("decoder.layers.1.fc1/*", "head/*")),
        Rule("fp8_e4m3fn", ("op:linear",)),
    )
    plan, file = Plan(rules, autocast="bf16"), tmp_path / "te.yaml"
    assert write_lists(plan, "te", file).left_out == []
    again = read_lists(file, model=Net())
    assert again.rules == (
        Rule("bf16", ("decoder.layers.0.fc1/*", "decoder.layers.0.fc2/*")),
        Rule("mxfp8_e4m3", ("decoder.layers.1.fc1/*", "head/*")),
        rules[2],
    )
    # what yaml itself reads
    sections = yaml.safe_load(file.read_text())
    assert sections["bf16_layers"]["transformer_engine"] == {
        "DisableFP8Layer": {"enabled": True}
    }
    assert (
        sections["mxfp8_e4m3_layers"]["transformer_engine"]["FakeQuant"]["quant_format"]
        == "MXFP8E4M3"
    )


def test_what_it_cannot_say(tmp_path: Path) -> None:
    plan = Plan(
        (Rule("fp32", ("op:softmax", "class:LayerNorm")), Rule("int8", ("head/*",))),
        autocast="bf16",
    )
    message = failure(write_lists, plan, "transformer_engine", tmp_path / "te.yaml")
    assert "3 parts of the plan cannot be said to transformer_engine" in message
    written = write_lists(
        plan, "transformer_engine", tmp_path / "te.yaml", model=Net(), partial=True
    )
    assert any("op:softmax" in part for part in written.left_out)
    assert (
        "norm" in (tmp_path / "te.yaml").read_text()
    )  # the class, as the model's modules
