"""roundoff.site: names of operator calls, and the patterns that select them."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundoff.errors import PatternError
from roundoff.site import Site, first_match, matches, select

NAMES = [
    "encoder.0/linear",
    "encoder.0/linear#1",
    "encoder.1/softmax",
    "head/linear",
    "head.weight",
]

# Module paths are attribute names joined by dots; ModuleDict keys may hold anything but a dot, also a slash.
part = st.text(
    st.characters(exclude_characters=".#", exclude_categories=("Cs", "Cc")), min_size=1
)
paths = st.lists(part, max_size=4).map(".".join)
operators = st.from_regex(r"[a-z_][a-z0-9_]{0,20}", fullmatch=True)


@pytest.mark.parametrize(
    ("site", "text"),
    [
        (Site("encoder.0", "matmul", 1), "encoder.0/matmul#1"),
        (Site("encoder.0", "matmul"), "encoder.0/matmul"),
        (Site("", "mean"), "/mean"),
        (Site("", "mean", 12), "/mean#12"),
        (Site("blocks.a/b", "add", 2), "blocks.a/b/add#2"),  # ModuleDict({"a/b": ...})
    ],
)
def test_a_site_and_its_text(site, text):
    assert str(site) == text
    assert Site.parse(text) == site


@given(paths, operators, st.integers(0, 10**6))
def test_text_and_site_round_trip(module, operator, call):
    site = Site(module, operator, call)
    assert Site.parse(str(site)) == site


@pytest.mark.parametrize(
    "text",
    [
        "linear",
        "",
        "a/",
        "/",
        "a/linear#",
        "a/linear#x",
        "a/linear#-1",
        "a/#1",
        "a/linear#1.5",
        "a/linear#²",
    ],
)
def test_what_is_no_site_is_refused_with_the_way_out(text):
    with pytest.raises(PatternError) as error:
        Site.parse(text)
    assert "not the name of a site" in str(error.value)
    assert repr(text) in str(error.value)
    assert "module.path/operator#call" in str(error.value)


def test_sites_sort_by_module_operator_and_number():
    first, second, tenth = (Site("a", "linear", n) for n in (0, 2, 10))
    assert sorted([tenth, second, first]) == [
        first,
        second,
        tenth,
    ]  # as text, #10 stands before #2


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*/linear", ["encoder.0/linear", "head/linear"]),
        ("*/linear*", ["encoder.0/linear", "encoder.0/linear#1", "head/linear"]),
        ("encoder.*", ["encoder.0/linear", "encoder.0/linear#1", "encoder.1/softmax"]),
        ("encoder.[1-9]/*", ["encoder.1/softmax"]),
        ("head.weight", ["head.weight"]),
        ("?ead/linear", ["head/linear"]),
        ("*", NAMES),
    ],
)
def test_patterns(pattern, found):
    assert select(pattern, NAMES) == found
    assert [name for name in NAMES if matches(pattern, name)] == found


def test_patterns_mind_case():
    assert not matches("HEAD/*", "head/linear")


@given(st.text(max_size=30))
def test_every_name_matches_itself(name):
    assert matches(name, name)  # also with glob characters in it, such as "a[0]/linear"


@given(
    st.lists(st.text("ab/.*?[]", min_size=1, max_size=6), min_size=1),
    st.text("ab/.*?[]", max_size=6),
)
def test_select_keeps_what_fnmatch_and_equality_keep(names, pattern):
    expected = [n for n in names if n == pattern or fnmatch.fnmatchcase(n, pattern)]
    if expected:
        assert select(pattern, names) == expected
    else:
        with pytest.raises(PatternError):
            select(pattern, names)


def test_a_pattern_without_a_match_names_the_nearest():
    with pytest.raises(PatternError) as error:
        select("encoder.0/linaer", iter(NAMES))
    text = str(error.value)
    assert "'encoder.0/linaer' matches no site" in text
    assert "5 site names" in text
    assert "encoder.0/linear" in text


def test_selecting_from_nothing():
    with pytest.raises(PatternError, match="0 site names"):
        select("*", [])


def test_the_first_rule_wins():
    rules = [("*/softmax", "fp32"), ("encoder.*", "bf16"), ("*", "int8")]
    assert first_match(rules, "encoder.1/softmax") == "fp32"
    assert first_match(rules, "encoder.0/linear") == "bf16"
    assert first_match(rules, "head/linear") == "int8"
    assert first_match(rules[:2], "head/linear") is None
    assert first_match([], "head/linear") is None
