"""What a file brings takes time in proportion to it; its regular expressions are stopped.

What takes longer than that takes years here, or hours: no test looks at a clock.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from roundoff.errors import PlanError, QuantizationError
from roundoff.export import read_compressed
from roundoff.export.amct.text_format import parse_text
from roundoff.foreign import is_too_deep, parse_json, parse_toml
from roundoff.foreign_patterns import LONGEST, names_matched
from roundoff.plan import read_lists
from roundoff.plan.lists.source import read_json, read_yaml

#: 2^60 ways for a name of sixty letters, one after another.
SLOW = ("(a+)+$", "(a|a)*$", "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)x$", r"(?:a?){60}a{60}$")
NAME = "a" * 59 + "b"
#: A quote and a quarter of a million of escaped ones.
QUOTES = '"' + '\\"' * 250_000


@pytest.mark.parametrize("how", ["match", "search", "fullmatch"])
def test_matches_as_re_does(how: str) -> None:
    import re

    expressions = ["a.*", "b", "", "(?i)A", r"layers\.\d+\.", "(?!a).*b"]
    names = ["a", "ab", "b", "layers.1.mlp", "B", "x\nb", "\u00e4"]
    matched = names_matched(expressions, names, how)
    for text in expressions:
        expected = {name for name in names if getattr(re, how)(text, name)}
        assert matched[text] == expected


def test_nothing_is_matched_for_nothing() -> None:
    assert names_matched([], ["a"]) == {}
    assert names_matched(["("], []) == {"(": frozenset()}


@pytest.mark.parametrize(
    "text", ["(", "a{2,1}", "(?P<a>b)(?P<a>c)", "a" * (LONGEST + 1)]
)
def test_no_expression(text: str) -> None:
    with pytest.raises(ValueError, match="regular expression"):
        names_matched(["good", text], ["a"])


def test_slow_expressions_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundoff.foreign_patterns.SECONDS", 0.4)
    with pytest.raises(ValueError, match=r"longer than 0\.4 s"):
        names_matched(SLOW, [NAME])


def _checkpoint(folder: Path, *targets: str) -> Path:
    stored = {
        f"{NAME}.weight": torch.ones(2, 2, dtype=torch.int8),
        f"{NAME}.weight_scale": torch.ones(1),
    }
    save_file(stored, folder / "model.safetensors")
    groups = [
        {"targets": [target], "weights": {"num_bits": 8}, "format": "int-quantized"}
        for target in targets
    ]
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {str(number): group for number, group in enumerate(groups)},
    }
    config = json.dumps({"quantization_config": quantization})
    (folder / "config.json").write_text(config)
    return folder


def test_a_slow_target_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundoff.foreign_patterns.SECONDS", 0.4)
    with pytest.raises(QuantizationError, match="longer than"):
        read_compressed(_checkpoint(tmp_path, f"re:{SLOW[0]}"))


def test_a_name_comes_before_patterns_and_those_before_classes(tmp_path: Path) -> None:
    for targets in (("Linear", "re:a+b"), ("re:c", "re:a", "re:a+b"), ("re:c", NAME)):
        assert (
            f"{NAME}.weight" in read_compressed(_checkpoint(tmp_path, *targets)).tensors
        )
    with pytest.raises(QuantizationError, match="no group"):
        read_compressed(_checkpoint(tmp_path, "re:b", "linear"))


def test_a_slow_pattern_of_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml")
    monkeypatch.setattr("roundoff.foreign_patterns.SECONDS", 0.4)
    file = tmp_path / "te.yaml"
    layers = "  enabled: True\n  layers:\n    layer_name_regex_pattern: "
    file.write_text(f"one:\n{layers}(a+)+$\n")
    with pytest.raises(PlanError, match="longer than"):
        read_lists(file, model=[NAME])


def test_numbers_of_layers_are_not_counted_out(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "te.yaml"
    layers = "  layers:\n    layer_types: [a]\n    layer_numbers: 0-99999999999999"
    features = "  transformer_engine:\n    DisableFP8Layer:\n      enabled: True"
    file.write_text(f"one:\n  enabled: True\n{layers}\n{features}\n")
    plan = read_lists(file, model=["a.7", "b.7"])
    assert plan.rules[0].sites == ("a.7/*",)


def test_quotes_that_nothing_ends() -> None:
    assert not is_too_deep(QUOTES)
    assert not is_too_deep(QUOTES.encode())
    with pytest.raises(ValueError, match="Unterminated"):
        parse_json(QUOTES)
    with pytest.raises(PlanError, match="not JSON"):
        read_json(QUOTES, "x")
    with pytest.raises(PlanError, match="no comments"):
        read_json("/*" * 250_000, "x")
    with pytest.raises(QuantizationError, match="not an AMCT record"):
        parse_text(QUOTES, "record", "x")


def test_lines_of_many_strings_are_counted_once() -> None:
    text = "[\n" + ",\n".join(['"a"'] * 50_000) + "]"
    assert [name.line for name in read_json(text, "x")[-2:]] == [50_000, 50_001]


@pytest.mark.parametrize("part", ["a", "ab", '"a"', "'a b'", "a-b "])
def test_keys_of_many_parts(part: str) -> None:
    assert parse_toml(".".join([part] * 50) + " = 1")
    with pytest.raises(ValueError, match="levels"):
        parse_toml(".".join([part] * 20_000) + " = 1")


def test_a_long_yaml_is_refused() -> None:
    pytest.importorskip("yaml")
    with pytest.raises(PlanError, match="too long"):
        read_yaml("- 1\n" * 200_000, "x")
