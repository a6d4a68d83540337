"""What is named for an edit: the line of a function, or of what has called it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from roundoff.compare.repairs.named_repairs import _line_of_some


def cut(call, *callers):
    """A call on line 9, of a helper that these lines lead to, the innermost first."""
    row = SimpleNamespace(
        call=call, line="p.py:9", callers=" < ".join(callers), phase="forward"
    )
    return SimpleNamespace(row=row, operator="slice")


GATES = [cut(n, f"p.py:{20 + n}", "p.py:50") for n in range(4)]


@pytest.mark.parametrize(
    ("edited", "line"),
    [({2, 3}, "p.py:22"), ({0, 1, 2, 3}, None)],
)
def test_the_caller_is_named_where_other_calls_of_the_line_stay(edited, line):
    flow = SimpleNamespace(values=dict(enumerate(GATES)))
    assert _line_of_some(flow, GATES[2], edited) == line


def test_the_line_itself_is_named_where_a_call_of_the_same_lines_stays():
    again = cut(4, "p.py:22", "p.py:50")
    flow = SimpleNamespace(values=dict(enumerate([*GATES, again])))
    assert _line_of_some(flow, GATES[2], {2, 3}) == "p.py:9"
