"""The plan as a file: round trips, rule order, messages."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundoff.errors import PlanError
from roundoff.plan.rules import Plan, Rule

NAMES = st.text(alphabet='ab.0/#*"\\é[]', min_size=1, max_size=12)
ABOUT = st.dictionaries(
    st.text("abc_", min_size=1),
    st.none() | st.floats(-1e9, 1e9) | NAMES | st.booleans(),
    max_size=3,
)


@given(
    rules=st.lists(
        st.tuples(
            st.sampled_from(["bf16", "int8", "mxfp4"]), st.lists(NAMES, max_size=3)
        ),
        max_size=4,
    ),
    about=ABOUT,
    suffix=st.sampled_from([".toml", ".json"]),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rules: list, about: dict, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("plan") / f"plan{suffix}"
    plan = Plan(tuple(Rule(fmt, tuple(sites)) for fmt, sites in rules), "fp32", about)
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded.rules == plan.rules
    # TOML has no null: what is not known is left out
    assert dict(loaded.about) == {
        k: v for k, v in about.items() if v is not None or suffix == ".json"
    }


def test_the_first_rule_that_names_a_site_decides() -> None:
    plan = Plan(
        (Rule("fp16", ("a/linear",)), Rule("bf16", ("a/*",)), Rule("int8", ("*",)))
    )
    assert plan.formats(["a/linear", "a/add", "b/add"]) == {
        "a/linear": "fp16",
        "a/add": "bf16",
        "b/add": "int8",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = 2\n", ["schema = 1", "schema = 2"]),
        ("not a plan", ["not a readable plan"]),
        ("schema = 1\nabout = 3\n", ["about is not a table", "got: 3"]),
        ('schema = 1\n[[rule]]\nformat = "bf16"\n', ["incomplete", "sites"]),
        (
            'schema = 1\n[[rule]]\nformat = "bf61"\nsites = ["*"]\n',
            ["unknown format", "bf61"],
        ),
    ],
)
def test_broken_files(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path / "p.toml")
    assert [word for word in words if word not in str(caught.value)] == []


def test_figures_are_read_from_about() -> None:
    about = {"target_db": 40, "note": "", "cost": None, "origin": {"a": "line 3"}}
    figures = Plan((), about=about).figures
    assert figures.target_db == 40
    assert figures.cost == 0.0
    assert figures.forwards == 1


@pytest.mark.parametrize(
    "about", [{"target_db": "forty"}, {"forwards": 1.5}, {"note": 3}, {"cost": True}]
)
def test_figures_of_another_type_are_named(about: dict) -> None:
    (name,) = about
    with pytest.raises(PlanError, match=f"the plan's {name} is not a"):
        _ = Plan((), about=about).figures
