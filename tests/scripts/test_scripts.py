"""A comparison of two recorded scripts names what was changed in one of them first.

A choice from the bank; benchmarks/script_bank.py asks for all of it, also from
statistics alone.
"""

from __future__ import annotations

import functools

import pytest

import roundoff

from . import (
    KINDS,
    NAMES,
    ScriptFault,
    faults_of,
    rank_of,
    record_script,
    rewrites_of,
    text_of,
)

_CHOSEN = {
    ("vqvae", "channels of the encoder"),
    ("vqvae", "no straight-through"),
    ("vqvae", "decay of the codebook"),
    ("recommender", "kernel over the other axis"),
    ("recommender", "order of the features"),
    ("gan", "sign of the real loss"),
}
_FAULTS = [
    fault
    for script in sorted({script for script, _ in _CHOSEN})
    for fault in faults_of(script)
    if (script, fault.name) in _CHOSEN
]


def test_the_bank_is_broad():
    everything = [fault for script in NAMES for fault in faults_of(script)]
    assert len(NAMES) >= 10
    assert len(everything) >= 150
    assert {fault.kind for fault in everything} == set(KINDS)
    assert len({(fault.script, fault.name) for fault in everything}) == len(everything)


@pytest.mark.parametrize("script", NAMES)
def test_every_fault_is_a_script_of_its_own(script):
    for fault in faults_of(script):
        compile(fault.text, fault.name, "exec")
        assert all(fault.true_lines())


def test_every_rewrite_is_a_script_of_its_own():
    rewrites = [rewrite for script in NAMES for rewrite in rewrites_of(script)]
    assert len(rewrites) >= 18
    for rewrite in rewrites:
        compile(rewrite.text, rewrite.name, "exec")
        assert rewrite.text != text_of(rewrite.script)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The recording of a script as it is, made once."""

    @functools.cache
    def of(script: str):
        folder = tmp_path_factory.mktemp("right") / script
        return record_script(text_of(script), folder)

    return of


def test_the_choice_is_there():
    assert len(_FAULTS) == len(_CHOSEN)


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
def test_the_truth_is_named_first(fault: ScriptFault, right, tmp_path):
    wrong = record_script(fault.text, tmp_path / "wrong")
    comparison = roundoff.compare(reference=right(fault.script), candidate=wrong)
    assert not comparison.agrees
    assert rank_of(fault, comparison.culprits()) == 1


@pytest.mark.parametrize(
    ("script", "start"),
    [
        # names blame its backward pass: a comparison of all of its values does not
        ("caption", "gates by hand, attention as products"),
        # another number of backward passes, after a step that agrees by its values
        ("audio_tag", "one backward for all parts"),
    ],
)
def test_a_rewrite_agrees(script, start, tmp_path):
    [rewrite] = [each for each in rewrites_of(script) if each.name.startswith(start)]
    reference = rewrite.record(tmp_path / "reference", candidate=False, keep="tensors")
    candidate = rewrite.record(tmp_path / "candidate", candidate=True, keep="tensors")
    found = roundoff.compare(reference=reference, candidate=candidate)
    assert found.agrees, found.answer
