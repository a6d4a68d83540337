"""Tables keep to the terminal, and lose nothing of what they say."""

from __future__ import annotations

import io
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from roundoff.report.terminal import LEFT_ALIGNED, HarmlessConsole, print_table

#: Headings of text, and of numbers; no letter of a cell is in them.
TEXT = ("site", "line", "operator")
NUMBERS = ("12", "34", "56", "78", "90")
LETTERS = list(string.ascii_uppercase + string.ascii_lowercase)
LETTERS = [c for c in LETTERS if c not in "".join(TEXT)]


def printed(columns, width, **options):
    console = HarmlessConsole(width=width, file=io.StringIO(), color_system=None)
    print_table(console, columns, **options)
    return console.file.getvalue()


@st.composite
def tables(draw):
    names = draw(st.lists(st.sampled_from([*TEXT, *NUMBERS]), min_size=2, unique=True))
    rows = draw(st.integers(1, 3))
    letters = iter(LETTERS)
    lengths = {name: 40 if name in TEXT else 14 for name in names}
    return {
        name: [next(letters) * draw(st.integers(1, lengths[name])) for _ in range(rows)]
        for name in names
    }


@given(tables(), st.integers(32, 160))
@example({"site": ["A" * 40], "line": ["B" * 40], "12": ["C"], "34": ["D"]}, 32)
def test_no_line_is_wider_and_no_cell_is_cut(columns, width):
    text = printed(columns, width)
    assert all(cell_len(line.rstrip()) <= width for line in text.splitlines())
    first = next(iter(columns))
    for name, cells in columns.items():
        parts = text.count("─\n") if name == first else 1
        for cell in cells:
            assert text.count(cell[0]) == len(cell) * parts, name


def test_numbers_stay_on_one_line_where_names_fold():
    columns = {
        "site": ["encoder/layers/0/attention/linear"],
        "12": ["3.14159265358979"],
    }
    lines = printed(columns, 34).splitlines()
    assert sum("3.14159265358979" in line for line in lines) == 1
    assert max(map(cell_len, lines)) <= 34


def test_a_table_that_fits_stands_in_one_piece():
    text = printed({"site": ["a/linear"], "12": ["1"], "34": ["2"]}, 40)
    assert text.count("site") == 1
    assert "site" in LEFT_ALIGNED


@pytest.mark.parametrize("width", [20, 40])
def test_what_is_wider_goes_on_below_with_the_first_column(width):
    columns = {"site": ["a/linear"]} | {name: ["1.2345e-06"] for name in NUMBERS}
    text = printed(columns, width)
    assert text.count("site") == text.count("a/linear") > 1
    assert text.count("1.2345e-06") == len(NUMBERS)
