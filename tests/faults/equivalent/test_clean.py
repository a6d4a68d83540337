"""A few cases of each bank: nothing right is blamed, and a planted bug is named first. The benchmark has all."""

from __future__ import annotations

import sys

import pytest
import torch

import roundoff
from roundoff.site import matches

from .layer_scripts import LAYER_SCRIPTS
from .layers import LAYERS
from .layouts import LAYOUTS, launch, one_process
from .pairs import pairs
from .schedules import SCHEDULES
from .script_pairs import PAIRS as SCRIPTS
from .script_portions import LAYOUTS as OF_RANKS
from .script_portions import SCHEDULES as OF_PORTIONS

PAIRS = {(pair.network, pair.name): pair for pair in pairs()}
RIGHT = ("chunked_prefill", "padded_on_the_right", "accumulated_by_size")
WRONG = ("cache_overwritten", "padding_on_the_left_seen", "accumulation_not_divided")


#: What each of them was wrongly blamed for: a frozen average that is moved by hand, a
#: softmax along the other axis of a transpose, a norm folded into weights, parameters
#: that are handed on, keys' biases without a gradient, what packed sequences leave
#: unread, and portions of a first step that also makes the model.
RIGHT_SCRIPTS = (
    "mlp_ema_lerp_by_hand",
    "clip_contrastive_symmetric",
    "flow_logdet_slogdet",
    "conv_batchnorm_folded_eval",
    "mlp_functional_call_grad",
    "mlp_adam_by_hand",
    "encoder_padded_unpadded",
    "gru_packed_padded",
    "beam_of_one",
    "kv_cache_decode_greedy",
    "padding_right_loss",
    "packed_documents",
)
WRONG_SCRIPTS = (
    "kv_cache_chunked_prefill, bug 2",
    "padding_left, bug 1",
    "padding_left, bug 2",
    "packed_documents, bug 1",
    "packed_documents, bug 2",
    "sliding_windows, bug 1",
    "micro_batches, bug 2",
    "streaming_conv_state, bug 1",
    "beam_of_one, bug 1",
)


def compared(reference, candidate):
    return roundoff.compare(reference=reference, candidate=candidate)


def is_named(case, culprit):
    names = [n for n in (culprit.site, culprit.reference_site, culprit.name) if n]
    names += [name.partition("#")[0] for name in names]
    return any(matches(glob, name) for glob in case.sites for name in names)


def test_the_banks_are_broad():
    assert len(PAIRS) >= 60
    assert len({network for network, _ in PAIRS}) >= 8
    assert sum(not case.sites for case in SCHEDULES) >= 10
    assert sum(not case.sites for case in LAYOUTS) >= 12
    assert sum(bool(case.sites) for case in SCHEDULES) >= 12
    assert sum(bool(case.sites) for case in LAYOUTS) >= 12
    assert len(SCRIPTS) >= 40
    assert sum(not case.sites for case in OF_PORTIONS) >= 8
    assert sum(not case.sites for case in OF_RANKS) >= 6


@pytest.mark.parametrize(
    "which", [("gpt", "renamed"), ("digits", "checkpointed"), ("graph", "two threads")]
)
def test_a_clean_pair_agrees(which, tmp_path):
    PAIRS[which].reference(tmp_path / "reference")
    PAIRS[which].candidate(tmp_path / "candidate")
    comparison = compared(tmp_path / "reference", tmp_path / "candidate")
    assert comparison.agrees, comparison.answer


@pytest.mark.parametrize("name", RIGHT + WRONG)
def test_a_schedule(name, tmp_path):
    (case,) = (case for case in SCHEDULES if case.name == name)
    case.record(tmp_path / "reference", candidate=False)
    case.record(tmp_path / "candidate", candidate=True)
    comparison = compared(tmp_path / "reference", tmp_path / "candidate")
    assert comparison.agrees == (not case.sites), comparison.answer
    if case.sites:
        assert is_named(case, comparison.culprits(1)[0]), comparison.answer


@pytest.fixture
def compared_scripts(tmp_path):
    def compare(case, keep):
        runs = [
            case.record_here(tmp_path / side, candidate=candidate, keep=keep)
            for side, candidate in (("reference", False), ("candidate", True))
        ]
        return compared(*runs)

    return compare


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize("name", RIGHT_SCRIPTS)
def test_scripts_that_compute_the_same_agree(name, keep, compared_scripts):
    (case,) = (case for case in [*SCRIPTS, *OF_PORTIONS] if case.name == name)
    comparison = compared_scripts(case, keep)
    assert comparison.agrees, comparison.answer


@pytest.mark.parametrize("name", WRONG_SCRIPTS)
def test_a_bug_in_a_script_in_portions_is_named_first(name, compared_scripts):
    (case,) = (case for case in OF_PORTIONS if case.name == name)
    comparison = compared_scripts(case, "tensors")
    assert case.is_named(comparison.culprits(1)[0]), comparison.answer


@pytest.mark.parametrize(
    "name",
    [
        "own_multihead_attention",
        "dilated_groups_as_loop, bug 1",
        "own_encoder_layer, bug 2",
    ],
)
def test_a_layer_by_another_hand(name, tmp_path):
    (case,) = (case for case in LAYERS if case.name == name)
    comparison = compared(
        case.record(tmp_path / "reference", candidate=False),
        case.record(tmp_path / "candidate", candidate=True),
    )
    assert comparison.agrees == (not case.sites), comparison.answer
    if case.sites:
        assert case.is_named(comparison.culprits(1)[0]), comparison.answer


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["", ", bug 1"])
def test_what_a_last_number_is_made_of_is_looked_at(bug, compared_scripts):
    pytest.importorskip("transformers")
    name = f"bert_one_sentence_at_a_time{bug}"
    (case,) = (case for case in LAYER_SCRIPTS if case.name == name)
    comparison = compared_scripts(case, "tensors")
    assert comparison.agrees == (not bug), comparison.answer


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform == "win32",
    reason="needs torch.distributed",
)
def test_layouts(tmp_path):
    # one right and one wrong, one that trains and one that does not: each costs seconds
    names = ("ddp", "mean_for_sum")
    launch(tmp_path, names)
    one_process(tmp_path / "trained", trains=True, steps=1)
    one_process(tmp_path / "inferred", trains=False, steps=1)
    for case in LAYOUTS:
        if case.name not in names:
            continue
        reference = tmp_path / ("trained" if case.trains else "inferred")
        comparison = compared(reference, tmp_path / case.name)
        assert comparison.agrees == (not case.sites), comparison.answer
        assert comparison.table["rank"].n_unique() == case.world
        if case.sites:
            assert is_named(case, comparison.culprits(1)[0]), comparison.answer


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform == "win32",
    reason="needs torch.distributed",
)
@pytest.mark.parametrize("name", ["pipeline_by_hand", "sequence_split, bug 1"])
def test_a_script_in_several_processes(name, tmp_path):
    (case,) = (case for case in OF_RANKS if case.name == name)
    comparison = compared(
        case.record(tmp_path / "reference", candidate=False),
        case.record(tmp_path / "candidate", candidate=True),
    )
    assert comparison.agrees == (not case.sites), comparison.answer
    if case.sites:
        assert case.is_named(comparison.culprits(1)[0]), comparison.answer
