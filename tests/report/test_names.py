"""Site names in few columns stay names of one site."""

from __future__ import annotations

import fnmatch

import pytest

from roundoff.report.names import elide, wrap

PARTS = "self.query/linear self.key/linear self.value/linear self/matmul self/matmul#1 output.dense/linear".split()
NAMES = [
    f"encoder.layer.{layer}.attention.{part}" for layer in range(12) for part in PARTS
]


def test_a_name_that_fits_stays():
    assert elide("head/linear", 11, ["tail/linear"]) == "head/linear"
    assert elide("", 4) == ""


@pytest.mark.parametrize("width", range(12))
def test_never_wider(width):
    short = elide("encoder.layer.11.output/linear", width, NAMES)
    assert len(short) == (width if width >= 3 else min(width, 1))
    assert "…" in short or width == 0


def test_the_cut_is_in_the_middle():
    short = elide("encoder.layer.11.output/linear", 20)
    head, tail = short.split("…")
    assert "encoder.layer.11.output/linear".startswith(head)
    assert tail.endswith("/linear")
    assert abs(len(head) - len(tail)) <= 2


@pytest.mark.parametrize("width", [24, 28, 32])
def test_a_short_name_means_one_site(width):
    # what a reader can conclude from "a…b" is what the glob "a*b" matches
    for name in NAMES:
        pattern = elide(name, width, NAMES).replace("…", "*")
        assert fnmatch.filter(NAMES, pattern) == [name]


def test_names_that_cannot_be_told_apart_are_still_cut():
    twins = ["a" * 10 + middle + "b" * 10 for middle in "xy"]
    assert elide(twins[0], 9, twins) == "aaaa…bbbb"


@pytest.mark.parametrize("width", [3, 8, 20, 60])
def test_a_wrapped_name_has_all_its_letters(width):
    for name in [*NAMES, "x" * 50, "", "é" * 9 + "/linear"]:
        lines = wrap(name, width).split("\n")
        assert "".join(lines) == name
        assert all(len(line) <= width for line in lines)
