"""Each rule does what its documentation says: the wrong example, the right one, the fix."""

import importlib
import re
from pathlib import Path

import pytest

from roundoff.lint import RULES, THEMES, LintConfig, Rule, lint_paths

DOCS = Path(__file__).parents[2] / "docs"


def lint(tmp_path, text, *, mend=False):
    file = tmp_path / "script.py"
    file.write_text(text)
    result = lint_paths([file], LintConfig(), mend=mend)
    assert result.unread == ()
    return result


def codes(result):
    return {finding.code for finding in result.findings}


each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)


@each_rule
def test_the_wrong_example_breaks_this_rule_and_no_other(rule: Rule, tmp_path):
    assert codes(lint(tmp_path, rule.wrong)) == {rule.code}


@each_rule
def test_the_right_example_breaks_none(rule: Rule, tmp_path):
    assert codes(lint(tmp_path, rule.right)) == set()


@each_rule
def test_a_fix_leaves_a_script_without_findings(rule: Rule, tmp_path):
    first = lint(tmp_path, rule.wrong, mend=True)
    if not first.fixed:
        return
    (fixed,) = first.fixed
    assert fixed.after != fixed.before
    assert codes(first) == set()
    again = lint(tmp_path, fixed.after, mend=True)
    assert again.fixed == ()
    assert codes(again) == set()


@each_rule
def test_texts_of_a_rule_are_written_as_all_are(rule: Rule):
    assert re.fullmatch(r"RO\d{3}", rule.code)
    assert rule.code[:3] in THEMES
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
    assert not rule.message.endswith(".")
    assert rule.message[0].islower() or rule.message.split()[0] != rule.message[0]
    assert rule.why.endswith(".")
    assert "\n" not in rule.message
    assert rule.wrong.endswith("\n")
    assert rule.right.endswith("\n")


def test_codes_and_names_are_unique():
    assert len({rule.code for rule in RULES}) == len(RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_the_page_lists_the_rules_as_they_are(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    page_of_rules = importlib.import_module("lint_rules")
    page = (DOCS / "lint.md").read_text()
    assert page_of_rules.with_rules(page) == page, "run `python docs/lint_rules.py`"
