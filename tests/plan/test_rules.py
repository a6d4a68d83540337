"""Plan: which rule decides, what a plan for another model says, and the file, whatever stands in it."""

from __future__ import annotations

import json
import tomllib
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import OutputError, PlanError
from roundoff.formats import FORMATS
from roundoff.plan.rules import Plan, Rule

SITES = ["encoder.0/linear", "encoder.0/softmax", "encoder.1/linear", "head/linear"]
# what TOML can hold: any character but surrogates
texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
    st.lists(texts, max_size=3),
    st.dictionaries(texts, st.floats(-1e6, 1e6), max_size=2),
)
plans = st.builds(
    lambda rules, default, about: Plan(
        tuple(Rule(f, tuple(s)) for f, s in rules), default, about
    ),
    st.lists(
        st.tuples(
            st.sampled_from(sorted(FORMATS)), st.lists(texts, min_size=1, max_size=3)
        ),
        max_size=4,
    ),
    st.sampled_from(["fp32", "bf16"]),
    st.dictionaries(texts, values, max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(plans, st.sampled_from([".toml", ".json", ".plan"]))
def test_any_plan_comes_back_from_its_file(tmp_path_factory, plan, suffix):
    path = tmp_path_factory.mktemp("plan") / f"plan{suffix}"
    plan.save(path)
    assert Plan.load(path) == plan


def test_the_files_are_ordinary_toml_and_json(tmp_path):
    plan = Plan.from_formats(
        {"a/linear": "bf16", "b/linear": "int8", "c/add": "fp32"},
        {"target_db": 40.0, "note": None},
    )
    for name, read in (("p.toml", tomllib.loads), ("p.json", json.loads)):
        plan.save(tmp_path / name)
        data = read((tmp_path / name).read_bytes().decode("utf-8"))
        assert data["schema"] == 1
        assert data["default"] == "fp32"
        assert data["about"]["target_db"] == 40.0
        assert (
            data["about"].get("note") is None
        )  # TOML has no null: the key is left out
        assert data["rule"] == [
            {"format": "bf16", "sites": ["a/linear"]},
            {"format": "int8", "sites": ["b/linear"]},
        ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*SITES, "*", "*/linear", "encoder.*", "head/*"]),
            st.sampled_from(["fp32", "bf16", "int8"]),
        ),
        max_size=5,
    ),
    st.sampled_from(["fp32", "bf16"]),
)
def test_the_first_rule_wins(rules, default):
    """Against the definition: go through the rules in order and take the first whose pattern matches."""
    plan = Plan(tuple(Rule(fmt, (pattern,)) for pattern, fmt in rules), default)
    expected = {}
    for site in SITES:
        hits = [fmt for pattern, fmt in rules if fnmatchcase(site, pattern)]
        expected[site] = hits[0] if hits else default
        assert plan.format_of(site) == expected[site]
    assert plan.formats(SITES) == {s: f for s, f in expected.items() if f != "fp32"}


def test_rules_with_many_patterns_keep_their_order():
    plan = Plan((Rule("fp32", ("*/softmax", "head/*")), Rule("bf16", ("*",))))
    assert plan.formats(SITES) == {
        "encoder.0/linear": "bf16",
        "encoder.1/linear": "bf16",
    }


def test_other_names_of_formats_are_known():
    """A plan written by hand may say bfloat16 or float32; the budget's rows say bf16 and fp32."""
    plan = Plan((Rule("bfloat16", ("encoder.*",)), Rule("float32", ("head/*",))))
    assert plan.format_of("encoder.0/linear") == "bf16"
    assert plan.formats(SITES) == dict.fromkeys(SITES[:3], "bf16")


def test_a_plan_of_another_model_says_what_it_misses():
    plan = Plan(
        (
            Rule(
                "bf16", ("encoder.0/linear", *(f"lost.{i}/linear" for i in range(12)))
            ),
            Rule("int8", ("gone*",)),
        )
    )
    with pytest.raises(PlanError) as error:
        plan.formats(SITES)
    text = str(error.value)
    assert "13 of the plan's 14 patterns match no site" in text
    assert "lost.9/linear" in text
    assert "lost.10/linear" not in text
    assert "and 3 more" in text
    assert "encoder.0/linear, encoder.0/softmax, encoder.1/linear" in text
    assert "roundoff budget, then roundoff plan" in text


def test_an_empty_plan_fits_every_model():
    assert Plan(()).formats(SITES) == {}
    assert Plan((), "bf16").formats(SITES) == dict.fromkeys(SITES, "bf16")
    assert Plan(()).formats([]) == {}


def test_unknown_formats_are_refused_when_the_plan_is_made():
    for make in (lambda: Plan((Rule("bf61", ("*",)),)), lambda: Plan((), "fp33")):
        with pytest.raises(PlanError) as error:
            make()
        assert "unknown format" in str(error.value)
        assert "did you mean" in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.toml", "rule = [", "not a readable plan"),
        ("p.json", "{", "not a readable plan"),
        ("p.toml", "schema = 2", "got: schema = 2"),
        ("p.toml", "", "got: schema = None"),
        ("p.toml", 'schema = 1\nkind = "quantization record"', "a quantization record"),
        ("p.json", "[1]", "got: list"),
        (
            "p.toml",
            'schema = 1\n[[rule]]\nformat = "bf16"',
            "a rule is incomplete: 'sites'",
        ),
        (
            "p.toml",
            'schema = 1\n[[rule]]\nsites = ["*"]',
            "a rule is incomplete: 'format'",
        ),
        (
            "p.toml",
            'schema = 1\n[[rule]]\nformat = "bf16"\nsites = "*/linear"',
            "sites is '*/linear', no list",
        ),
        (
            "p.toml",
            'schema = 1\n[rule]\nformat = "bf16"\nsites = ["*"]',
            "a rule is incomplete",
        ),
        (
            "p.toml",
            'schema = 1\n[[rule]]\nformat = "bf61"\nsites = ["*"]',
            "unknown format",
        ),
        ("p.toml", b"\xff\xfe", "not a readable plan"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, name, text, words):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError) as error:
        Plan.load(tmp_path / name)
    assert words in str(error.value)
    if "unknown format" not in words:
        assert str(tmp_path / name) in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        Plan.load(tmp_path / "missing.toml")


def test_saving_where_one_may_not(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        Plan(()).save(tmp_path / "file" / "plan.toml")


def test_a_plan_over_autocast_is_read_back(tmp_path):
    plan = Plan(
        (Rule("fp32", ("*/softmax",)), Rule("follow", ("*/add",))), autocast="bf16"
    )
    for name in ("plan.toml", "plan.json"):
        plan.save(tmp_path / name)
        assert Plan.load(tmp_path / name) == plan
    with pytest.raises(PlanError, match="roundoff.autocast"):
        plan.format_of("a/softmax")
    with pytest.raises(PlanError, match="roundoff.autocast"):
        plan.formats(["a/softmax"])
    with pytest.raises(PlanError, match="unknown format"):
        Plan((Rule("follow", ("*/add",)),))
    with pytest.raises(PlanError, match="bf16 or fp16"):
        Plan((), autocast="int8")


def test_class_patterns_become_paths():
    model = torch.nn.Sequential(
        torch.nn.TransformerEncoderLayer(8, 2), torch.nn.LayerNorm(8)
    )
    plan = Plan(
        (
            Rule("fp32", ("class:LayerNorm",)),
            Rule("bf16", ("class:MultiheadAttention/linear",)),
        )
    )
    found = plan.for_model(model)
    assert [
        found.format_of(s) for s in ("1/layer_norm", "0.norm1/layer_norm", "0/add")
    ] == ["fp32"] * 3
    assert [found.format_of(f"0.self_attn/linear{n}") for n in ("", "#1")] == [
        "bf16",
        "bf16",
    ]
    assert found.format_of("0/linear") == "fp32"
    with pytest.raises(PlanError, match="such as LayerNorm"):
        Plan((Rule("fp32", ("class:LayrNorm",)),)).for_model(model)
