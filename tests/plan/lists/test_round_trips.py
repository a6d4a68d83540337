"""Whatever plan is written for a tool and read again says the same of every operator that it names."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundoff.errors import PlanError
from roundoff.ops.foreign_names import operator_names, translate
from roundoff.plan.lists.convert import read_lists, write_lists
from roundoff.plan.lists.fold import Operators
from roundoff.plan.lists.source import Name, read_json, read_settings
from roundoff.plan.rules import Plan, Rule

TARGETS = {"ascend": "cann", "paddle": "paddle", "tensorflow": "tensorflow"}
OPERATORS = st.lists(
    st.sampled_from(sorted(operator_names("torch"))), unique=True, max_size=8
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    low = draw(st.sampled_from(["bf16", "fp16"]))
    formats = {name: draw(st.sampled_from([low, "fp32"])) for name in draw(OPERATORS)}
    rules = tuple(
        Rule(f, tuple(f"op:{n}" for n, g in formats.items() if g == f))
        for f in sorted(set(formats.values()))
    )
    return Plan(rules, autocast=low)


@given(plan=plans(), tool=st.sampled_from(sorted(TARGETS)))
def test_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan, tool: str
) -> None:
    path = tmp_path_factory.mktemp("lists") / (
        "lists.json" if tool != "tensorflow" else "lists.env"
    )
    written = write_lists(plan, tool, path, partial=True)
    asked = Operators.of(plan).formats
    said = {
        o: f
        for o, f in asked.items()
        if not any(part.startswith(f"op:{o} ") for part in written.left_out)
    }
    assert all(
        translate(o, "torch", TARGETS[tool]) for o in said
    )  # the rest has no name there, or shares one
    if not written.left_out:
        write_lists(plan, tool, path)  # then it is no error either
    else:
        with pytest.raises(PlanError, match="cannot be said"):
            write_lists(plan, tool, path)
    if not said or path.read_text().strip() in ("", "{}"):
        assert not said
        return
    again = Operators.of(read_lists(path, tool=tool, format=plan.autocast)).formats
    if (
        not written.left_out
    ):  # names are shared: what was left out may be said by another operator's
        assert {o: again.get(o) for o in said} == said


@given(plan=plans())
def test_a_plan_read_from_lists_survives_its_own_file(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    write_lists(plan, "ascend", folder / "ops_info.json", partial=True)
    read = read_lists(folder / "ops_info.json", tool="ascend")
    read.save(folder / "plan.toml")
    loaded = read_lists(folder / "plan.toml")
    assert (loaded.rules, loaded.autocast) == (read.rules, read.autocast)
    assert dict(loaded.about) == dict(read.about)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(data=JSON, indent=st.sampled_from([None, 1]))
def test_json_is_read_as_the_standard_library_does_with_lines(
    data: object, indent: int | None
) -> None:
    text = json.dumps(data, indent=indent)
    found = read_json(text, "x.json")
    assert found == data
    lines = text.splitlines()

    def check(value: object) -> None:
        if isinstance(value, Name):
            assert json.dumps(str(value)) in lines[value.line - 1]
        elif isinstance(value, dict):
            for key, inner in value.items():
                check(key)
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)

    check(found)


@given(
    st.dictionaries(
        st.text("ABC_", min_size=1, max_size=5),
        st.text("aZ0,_.", max_size=6),
        max_size=6,
    )
)
def test_settings(settings: dict[str, str]) -> None:
    styles = ("{}={}", "export {}={}", "{}='{}'", 'export {}="{}"', "set {}={} # why")
    text = "\n".join(
        styles[i % len(styles)].format(*item) for i, item in enumerate(settings.items())
    )
    assert read_settings(text, "x.env") == settings


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "o.json"
    file.write_text("before")
    with pytest.raises(PlanError):
        write_lists(Plan((Rule("fp32", ("head/*",)),), autocast="bf16"), "ascend", file)
    assert file.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.json"]
    with pytest.raises(PlanError, match="no lists of this tool can be written"):
        write_lists(Plan(()), "mindspore", file)
