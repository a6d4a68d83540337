"""What a notebook and the prompt show of results: short, escaped, whole where it matters."""

from html.parser import HTMLParser

import pytest
import torch

import roundoff
from roundoff.notebook import ROWS, table


class Checked(HTMLParser):
    """Raises where a tag is not closed."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def words(html):
    page = Checked()
    page.feed(html)
    assert page.open == []
    return " ".join(page.text)


@pytest.fixture(scope="module")
def diagnosis():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    workload = roundoff.Workload(net, [torch.randn(4, 8)])
    return roundoff.diagnose(workload, ["bf16", "int8"], target=30, checks=0)


def test_budget_plan_and_diagnosis(diagnosis):
    for result in (diagnosis, diagnosis.budget, diagnosis.plan):
        assert len(repr(result)) < 200
        assert "\n" not in repr(result)
        assert "0/linear" in words(result._repr_html_())
    assert repr(diagnosis.plan).startswith("<Plan: ")
    assert "target met" in repr(diagnosis)
    assert "bf16, int8" in repr(diagnosis.budget)


def test_comparison(tmp_path):
    for name in ("a", "b"):
        with roundoff.capture(tmp_path / name, keep="tensors"):
            torch.ones(3).exp()
    comparison = roundoff.compare(reference=tmp_path / "a", candidate=tmp_path / "b")
    assert "pass" in repr(comparison)
    assert len(repr(comparison)) < 300
    assert comparison.answer in words(comparison._repr_html_())


def test_names_are_escaped_and_long_tables_end():
    html = table("<b>", ["a & b"], ["x"], [["<script>"]] * (ROWS + 5))
    assert "<script>" not in html
    text = words(html)
    assert "<b>" in text
    assert text.count("<script>") == ROWS
    assert "5 more rows" in text
    assert "<table" not in table("empty", [], ["x"], [])
