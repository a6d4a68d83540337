"""A comparison names the true site of faults of every kind first, and nothing where nothing is wrong.

A choice from the bank; benchmarks/fault_bank.py asks for all of it, also from statistics alone.
"""

from __future__ import annotations

import functools

import pytest

import roundoff

from . import FAULTS, clean_pairs, record
from .bank import write
from .program import FAMILIES, program

CHOSEN = """
    layer_norm_eps align_corners rms_norm_eps softmax_axis bias_dropped drift gradient_tail one_nan
    sum_in_bf16 state_in_bf16 coupled_decay branch_detached
""".split()
_FAULTS = [fault for fault in FAULTS if fault.name in CHOSEN]


def test_the_choice_is_broad():
    assert len(_FAULTS) == len(CHOSEN) >= 12
    assert {fault.family for fault in _FAULTS} == set(FAMILIES)
    assert {fault.break_it.__module__ for fault in _FAULTS} == {
        fault.break_it.__module__ for fault in FAULTS
    }
    assert {phase for fault in _FAULTS for phase in fault.phase.split("|")} == {
        "forward",
        "backward",
        "optimizer",
    }


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The recording of a family's usual program, made once."""

    @functools.cache
    def of(family):
        folder = tmp_path_factory.mktemp("clean") / family
        write(functools.partial(program, family), folder)
        return folder

    return of


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
def test_the_true_site_is_named_first(fault, clean, tmp_path):
    assert (fault.usual, fault.steps) == (
        True,
        1,
    )  # so that the clean recording is theirs
    record(fault, tmp_path / "candidate", faulty=True)
    found = roundoff.compare(
        reference=clean(fault.family), candidate=tmp_path / "candidate"
    )
    assert not found.agrees
    (first,) = found.culprits(1)
    assert fault.named_by(first.phase, first.site, first.reference_site, first.name), (
        first
    )


_PAIRS = [
    p for p in clean_pairs() if p.family == "lstm" and "compiled" not in p.name
]  # compiling takes long


@pytest.mark.parametrize("pair", _PAIRS, ids=lambda pair: pair.name)
def test_nothing_is_blamed_where_nothing_is_wrong(pair, tmp_path, request):
    if "bf16" in pair.name:
        request.getfixturevalue("bf16_lstm")
    pair.reference(tmp_path / "reference")
    pair.candidate(tmp_path / "candidate")
    found = roundoff.compare(
        reference=tmp_path / "reference", candidate=tmp_path / "candidate"
    )
    assert (
        found.table.filter(verdict="fail").select("site", "error", "cause").rows() == []
    )
    assert found.agrees
    assert found.culprits() == []
