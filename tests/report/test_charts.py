"""Charts: marks stand where the axis labels say that their numbers are."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundoff.report import DiagnosisSummary, ScatterPoint, html
from roundoff.report.answer import totals
from roundoff.report.charts import pareto, scatter, share_bars
from roundoff.report.svg import nice_ticks

# two decimals of each of two tick marks and a mark itself: three roundings of at most 0.005
CLOSE = 0.016


def parse(svg):
    return ET.fromstring(str(svg))  # well-formed XML, hence balanced HTML


def axis(root, name):
    """The axis as a reader sees it: a straight line through its first and last labelled tick."""
    position = "x" if name == "x" else "y"
    ticks = [t for t in root.iter("text") if t.get("class") == f"tick {name}"]
    lift = 0 if name == "x" else 4  # labels stand 4 below their line
    value = [
        float(t.text.rstrip("%")) / (100 if t.text.endswith("%") else 1) for t in ticks
    ]
    place = [float(t.get(position)) - lift for t in ticks]
    slope = (place[-1] - place[0]) / (value[-1] - value[0])
    for v, p in zip(value, place, strict=True):
        assert p == pytest.approx(place[0] + (v - value[0]) * slope, abs=CLOSE)
    return lambda v: place[0] + (v - value[0]) * slope


def points(rows):
    return [ScatterPoint(**row) for row in rows]


def format_totals(summary):
    record = DiagnosisSummary.from_dict(summary)
    return totals(record.formats, record.ranking)


def circles(root, kind):
    return [c for c in root.iter("circle") if c.get("class").split()[0] == kind]


def test_scatter_has_one_circle_for_each_row_where_its_numbers_are(summary):
    root = parse(scatter(points(summary["scatter"]), summary["formats"]))
    x, y = axis(root, "x"), axis(root, "y")
    dots = circles(root, "dot")
    assert len(dots) == len(summary["scatter"]) == 48
    for dot, row in zip(dots, summary["scatter"], strict=True):
        assert float(dot.get("cx")) == pytest.approx(x(row["predicted_db"]), abs=CLOSE)
        assert float(dot.get("cy")) == pytest.approx(y(row["measured_db"]), abs=CLOSE)
        assert dot.get("class") == f"dot c{summary['formats'].index(row['format'])}"
        title = dot.find("title").text
        assert title.startswith(
            f"{row['site']} in {row['format']}: {row['predicted_db']:.1f} dB predicted"
        )


def test_diagonal_and_band_are_where_prediction_is_right_within_one_decibel(summary):
    root = parse(scatter(points(summary["scatter"]), summary["formats"]))
    x, y = axis(root, "x"), axis(root, "y")
    (line,) = [n for n in root.iter("line") if n.get("class") == "diagonal"]
    value = 31.0  # inside the axes; a point with equal numbers is on the line
    x1, y1, x2, y2 = (float(line.get(name)) for name in ("x1", "y1", "x2", "y2"))
    assert y1 + (x(value) - x1) / (x2 - x1) * (y2 - y1) == pytest.approx(
        y(value), abs=CLOSE
    )
    (band,) = root.iter("polygon")
    corners = [
        tuple(map(float, corner.split(","))) for corner in band.get("points").split()
    ]
    # corners in decibels, by the inverse of the axes
    unit_x, unit_y = x(1) - x(0), y(1) - y(0)
    differences = sorted(
        round((py - y(0)) / unit_y - (px - x(0)) / unit_x, 2) for px, py in corners
    )
    assert differences == pytest.approx([-1, -1, 0, 0, 1, 1], abs=0.01)


def test_scatter_leaves_out_what_has_no_place(summary):
    rows = [
        r | {"measured_db": v}
        for r, v in zip(
            summary["scatter"], [None, math.inf, math.nan, 30.0], strict=False
        )
    ]
    assert len(circles(parse(scatter(points(rows), summary["formats"])), "dot")) == 1
    assert scatter(points(rows[:3]), summary["formats"]) == scatter([], []) == ""


def test_scatter_of_one_point_has_axes(summary):
    root = parse(
        scatter(
            [ScatterPoint(site="a", format="other", predicted_db=5.0, measured_db=5.0)],
            [],
        )
    )
    assert axis(root, "x")(5.0) == pytest.approx(
        float(circles(root, "dot")[0].get("cx")), abs=CLOSE
    )


def test_pareto_points_target_and_plan_are_where_their_numbers_are(summary):
    root = parse(pareto(DiagnosisSummary.from_dict(summary)))
    x, y = axis(root, "x"), axis(root, "y")
    knots = circles(root, "knot")
    assert len(knots) == len(summary["pareto"])
    for knot, point in zip(knots, summary["pareto"], strict=True):
        assert float(knot.get("cx")) == pytest.approx(
            x(point["predicted_db"]), abs=CLOSE
        )
        assert float(knot.get("cy")) == pytest.approx(
            y(point["relative_cost"]), abs=CLOSE
        )
    (plan,) = circles(root, "chosen")
    assert float(plan.get("cx")) == pytest.approx(x(31.05), abs=CLOSE)
    assert float(plan.get("cy")) == pytest.approx(y(31.4159 / 88.75), abs=CLOSE)
    (target,) = [n for n in root.iter("line") if n.get("class") == "target"]
    assert (
        float(target.get("x1"))
        == float(target.get("x2"))
        == pytest.approx(x(30.0), abs=CLOSE)
    )


@pytest.mark.parametrize("chosen", [None, math.inf])
def test_pareto_marks_no_plan_without_a_finite_prediction(summary, chosen):
    summary["result"]["predicted_db"] = chosen
    assert not circles(parse(pareto(DiagnosisSummary.from_dict(summary))), "chosen")
    summary["pareto"] = []
    assert pareto(DiagnosisSummary.from_dict(summary)) == ""


def test_bars_are_as_long_as_the_shares_and_split_like_the_parts(summary):
    (int8,) = [t for t in format_totals(summary) if t.format == "int8"]
    rows = sorted(
        (r for r in summary["ranking"] if r["format"] == "int8"),
        key=lambda r: -r["share"],
    )[:7]
    bars = list(parse(share_bars(int8, summary["formats"], set(), top=7)).iter("g"))
    assert len(bars) == 7
    lengths = [sum(float(r.get("width")) for r in bar.iter("rect")) for bar in bars]
    for bar, row, length in zip(bars, rows, lengths, strict=True):
        # at most three rectangles, each rounded to 0.005, in either bar
        assert length / lengths[0] == pytest.approx(
            row["share"] / rows[0]["share"], abs=0.03 / lengths[0]
        )
        pieces = {r.get("class"): float(r.get("width")) for r in bar.iter("rect")}
        powers = {p: 10 ** (-row[f"{p}_db"] / 10) for p in pieces}
        for part, piece in pieces.items():
            assert piece == pytest.approx(
                length * powers[part] / sum(powers.values()), abs=0.02
            )
        assert bar.find("title").text.startswith(f"{row['site']}: ")


def test_a_lost_site_has_a_bar_of_its_own_kind(summary):
    (fp16,) = [t for t in format_totals(summary) if t.format == "fp16"]
    first = next(parse(share_bars(fp16, summary["formats"], set())).iter("g"))
    assert [r.get("class") for r in first.iter("rect")] == ["lost"]
    assert [t.text for t in first.iter("text")][-1] == "lost"
    assert first.find("title").text.startswith(
        "<script>alert('x')&amp;</script>/linear: "
    )


def test_the_page_has_bars_for_each_format(summary):
    page = html.page(DiagnosisSummary.from_dict(summary)).render()
    assert [page.count(f'<svg class="bars c{i}"') for i in range(5)] == [1, 1, 1, 1, 0]


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_enclose_the_range_in_steps_of_1_2_or_5(low, span, count):
    high = low + span
    ticks = nice_ticks(low, high, count)
    slack = 1e-9 * max(
        abs(low), abs(high)
    )  # of the floor and ceiling of a quotient of floats
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    # a step is within a factor sqrt(2.5) of the asked one, and both ends add less than one step
    assert 2 <= len(ticks) <= math.sqrt(2.5) * count + 3
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    digits = f"{step:.3e}"[:5]
    assert digits in ("1.000", "2.000", "5.000")


def test_ticks_of_an_empty_range():
    assert nice_ticks(3.0, 3.0)[0] < 3.0 < nice_ticks(3.0, 3.0)[-1]
