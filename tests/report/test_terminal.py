"""Tables in narrow terminals: no line wider, and every cell there whole."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from roundoff.advise import Counts, OperatorTime, Profile
from roundoff.check.checkpoints import CheckpointCheck, TensorChange
from roundoff.compare.judging.value_difference import InputDifference
from roundoff.compare.nonfinite.overflow import trace_overflow
from roundoff.record import Replay, ReplayedOutput
from roundoff.record.disk.sites import describe_sites
from roundoff.report import (
    print_advice,
    print_bench,
    print_checkpoints,
    print_comparison,
    print_diff,
    print_overflow,
    print_ranking,
    print_replay,
    print_show,
    print_summary,
    print_tuning,
    text,
)
from roundoff.report.terminal import print_table
from roundoff.train import ParetoPoint, RankedSite

from . import (
    test_advise,
    test_bench,
    test_comparison,
    test_run_text,
    test_text,
    test_tune_text,
)

PATH = "model.encoder.layers.11.self_attention.output_projection"
SITE = f"{PATH}/linear"
WITHOUT_A_BREAK = "x" * 70
UNBOUNDED = 100_000


class Terminal(Console):
    """A console that keeps each table beside the lines that it became."""

    def __init__(self, width):
        self.page = io.StringIO()
        super().__init__(file=self.page, width=width)
        self.tables = []

    def print(self, *objects, **options):
        start = self.page.tell()
        super().print(*objects, **options)
        if objects and isinstance(objects[0], Table):
            lines = self.page.getvalue()[start:].splitlines()
            self.tables.append((objects[0], lines))

    def columns(self):
        """Heading and all letters of each column, as they can be read on the screen."""
        found = set()
        for table, lines in self.tables:
            widths = [column.width for column in table.columns]
            gap = (table.width - sum(widths)) // max(len(widths) - 1, 1)
            start = 0
            rule = next(i for i, line in enumerate(lines) if set(line) == {"─"})
            for width in widths:
                cells = [line[start : start + width] for line in lines]
                parts = (cells[:rule], cells[rule + 1 :])
                found.add(tuple("".join("".join(p).split()) for p in parts))
                start += width + gap
        return found


def checked(function, data, width, **options):
    """Check that nothing is wider than a terminal, and that nothing is lost in it."""
    narrow = Terminal(width)
    function(data, narrow, **options)
    lines = narrow.page.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    wide = Terminal(UNBOUNDED)
    function(data, wide, **options)
    assert wide.tables
    assert wide.columns() <= narrow.columns()


def advice():
    made = test_advise.summary([test_advise.row(place=SITE, name=WITHOUT_A_BREAK)])
    counts = [
        replace(made.counts.rows[0], module=f"{PATH}.{n}", flops=2e9) for n in range(3)
    ]
    times = tuple(
        OperatorTime("scaled_dot_product_attention", row.module, "backward", 0.002, 1.0)
        for row in counts
    )
    return replace(
        made, counts=Counts(tuple(counts), ()), profile=Profile(times, 0.006)
    )


def tuning():
    site = RankedSite(
        site=SITE,
        operator="linear",
        sqnr_db=31.2,
        stderr_db=0.1,
        share=0.5,
        activation_db=33.0,
        weight_db=36.0,
        output_db=40.0,
        note=None,
        gradient_db=50.0,
    )
    runs = [
        replace(test_tune_text.EQUAL, name="autocast", along=[(1, 40.2), (2, 39.1)]),
        *test_tune_text.TUNING.runs,
    ]
    points = [ParetoPoint(4.0, 0.5, 41.0, 3)]
    sites = [site, replace(site, site=WITHOUT_A_BREAK)]
    return replace(test_tune_text.TUNING, runs=runs, pareto=points, ranking=sites)


def replayed():
    row = ReplayedOutput(
        rank=0,
        step=3,
        record=5,
        phase="optimizer",
        site=SITE,
        overload="aten.addmm.default",
        place=0,
        own_l2=1e-6,
        own_max=5e-7,
        sqnr_db=120.0,
        reason=None,
    )
    reason = "an operator that draws random numbers as it did when it was recorded"
    dropped = replace(row, site=WITHOUT_A_BREAK, sqnr_db=None, reason=reason)
    return Replay(device="cpu", dtype="fp64", rows=(row, dropped))


def checkpoints():
    change = TensorChange(
        name=f"{PATH}.weight",
        dtypes=("float32", "bfloat16"),
        shapes=((1024, 4096), (1024, 4096)),
        equal=False,
        change=0.1,
        cosine=0.99,
        largest=1.0,
    )
    return CheckpointCheck(
        reference="a",
        candidate="b",
        changes=(change,),
        only_reference=(),
        only_candidate=(),
        renamed=(),
        prefixes=(),
    )


def compared():
    return test_comparison.data(
        rows=[
            test_comparison.row(),
            test_comparison.row(site=SITE, cause="inherited", origin=PATH),
        ]
    )


def overflow():
    return trace_overflow(test_run_text.BAD)


def shown():
    return describe_sites(test_run_text.BAD, rank=0)


CASES = {
    "advise": (print_advice, advice),
    "tune": (print_tuning, tuning),
    "replay": (print_replay, replayed),
    "overflow": (print_overflow, overflow),
    "show": (print_show, shown),
    "compare": (print_comparison, compared),
    "check": (print_checkpoints, checkpoints),
    "bench": (print_bench, test_bench.data),
}


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("verb", CASES)
def test_tables_of_each_verb(verb, width):
    function, made = CASES[verb]
    checked(function, made(), width)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("what", ["ranking", "all"])
def test_tables_of_budget_and_diagnose(summary, width, what, monkeypatch):
    monkeypatch.setattr(text, "WIDE", UNBOUNDED + 1)
    function = print_summary if what == "all" else print_ranking
    data = summary if what == "all" else summary["ranking"]
    checked(function, test_text.as_record(function, data), width)


@pytest.mark.parametrize("width", [60, 80])
def test_tables_of_diff(width):
    entry = InputDifference(
        site=SITE,
        name=None,
        call=0,
        reference_site=f"{PATH}/{WITHOUT_A_BREAK}",
        error=0.1,
        same=False,
    )
    checked(print_diff, test_comparison.difference(inputs=(entry,)), width)


def table(columns, console):
    print_table(console, columns)


@pytest.mark.parametrize("width", [24, 40, 60, 80])
@pytest.mark.parametrize("names", [1, 2, 3])
@pytest.mark.parametrize("numbers", [0, 1, 12])
def test_any_table(width, names, numbers):
    """Names of letters of two columns too, line ends in them, headings of many words."""
    columns = {
        name: [SITE, f"{WITHOUT_A_BREAK}.{name}", "two\nlines", "", "head/linear"]
        for name in ("site", "operator", "for example")[:names]
    }
    columns |= {
        f"{n} of the gradients": ["1", "22.5", "333,333", "–", "∞"]
        for n in range(numbers)
    }
    checked(table, columns, width)


def test_letters_of_two_columns_fit():
    terminal = Terminal(40)
    print_table(terminal, {"site": ["层" * 50], "SQNR": ["1.0"]})
    text_of = terminal.page.getvalue()
    assert text_of.count("层") == 50
    for line in text_of.splitlines():
        assert len(line) + line.count("层") <= 40


def test_a_part_begins_with_what_tells_its_rows_apart():
    columns = {"verdict": ["fail", "fail"], "site": ["a/mm", "b/mm"]}
    columns |= {f"number {n}": ["1.2345678"] * 2 for n in range(8)}
    terminal = Terminal(60)
    print_table(terminal, columns)
    headings = [[str(c.header) for c in t.columns] for t, _ in terminal.tables]
    assert len(headings) > 1
    assert all(part[:2] == ["verdict", "site"] for part in headings)


def test_without_a_terminal_nothing_wraps():
    terminal = Terminal(UNBOUNDED)
    print_table(terminal, {"site": [SITE * 20], "number of sites": ["1"]})
    assert len(terminal.page.getvalue().splitlines()) == 3


def test_no_number_is_cut_where_nothing_fits():
    terminal = Terminal(10)
    print_table(terminal, {"site": ["head/linear"], "SQNR": ["123,456,789.5"]})
    assert "123,456,789.5" in terminal.page.getvalue()
