"""The structure of a difference, from tensors made for each description and from near misses that must not get it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.compare.tensors import structure as module
from roundoff.compare.tensors.structure import (
    Structure,
    fewer_digits,
    structure,
    usual_error,
)

U = 2.0**-24


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(x):
    """As a kernel gives it: a few roundings of the largest magnitude off everywhere."""
    return x + 2 * U * x.abs().max() * random(*x.shape, seed=9).clamp(-3, 3)


@pytest.fixture
def right():
    return random(12, 8, 10)


def changed(right, harm):
    got = rounded(right)
    found = harm(got)
    return got if found is None else found


def set_to(place, value):
    def harm(x):
        x[place] = value

    return harm


def saturate(x):
    return x.clamp(-1.5, 1.5)


def duplicate(x):
    x[5] = x[2]


def garbage(x):
    x[3] = random(8, 10, seed=4)


def swap_blocks(x):
    return torch.cat([x[6:], x[:6]])


DESCRIBED = [
    (
        set_to(slice(9, None), 0.0),
        "partly written output",
        "elements are zero, from [9, 0, 0] on",
    ),
    (
        set_to((slice(None), slice(None), slice(8, None)), 0.0),
        "partly written output",
        "8 of axis 2 (10 long)",
    ),
    (
        set_to((slice(None), slice(7, None)), 3.5),
        "partly written output",
        "one constant from 7 of axis 1",
    ),
    (lambda x: torch.zeros_like(x), "partly written output", "every element is zero"),
    (
        set_to((3, 2, 1), 40.0),
        "corrupted elements",
        "1 of 960 elements differ, the first at [3, 2, 1]: 40, should be",
    ),
    (saturate, "overflow", "±1.5"),
    (lambda x: x * 1.001, "constant factor", "1.001 times"),
    (lambda x: x * 0.75, "constant factor", "0.75 (3/4) times"),
    (lambda x: -x, "constant factor", "-1 times"),
    (lambda x: x + 0.01, "constant offset", "+0.01 everywhere"),
    (
        lambda x: x * torch.linspace(0.5, 2, 8)[:, None],
        "constant factor",
        "each index of axis 1 by its own: 0.5 to 2",
    ),
    (
        lambda x: x + torch.linspace(-1, 2, 10),
        "constant offset",
        "each index of axis 2 by its own: -1 to +2",
    ),
    (
        lambda x: x.transpose(1, 2).reshape(12, 8, 10),
        "wrong axis or layout",
        "axes 1 and 2 of [12, 8, 10] are exchanged",
    ),
    (swap_blocks, "wrong axis or layout", "axis 0 of 12 is in another order"),
    (
        lambda x: x.flatten()[
            torch.randperm(960, generator=torch.Generator().manual_seed(1))
        ].reshape(x.shape),
        "wrong axis or layout",
        "the same values in other places",
    ),
    (
        duplicate,
        "stale or shared buffer",
        "index 5 of axis 0 holds what index 2 should",
    ),
    (garbage, "corrupted elements", "1 of 12 indices of axis 0 are wrong: 3"),
]


@pytest.mark.parametrize(
    ("harm", "label", "evidence"),
    DESCRIBED,
    ids=[f"{d[1]}-{i}" for i, d in enumerate(DESCRIBED)],
)
def test_each_description(right, harm, label, evidence):
    actual = changed(right, harm)
    kept = right.clone(), actual.clone()
    found = structure(right.double(), actual, U)
    assert found is not None
    assert found.label == label
    assert evidence in found.evidence
    assert torch.equal(kept[0], right)
    assert torch.equal(kept[1], actual)


@pytest.mark.parametrize(
    ("harm", "label"),
    [
        (lambda x: x, None),  # only rounding
        (lambda x: x * (1 + 0.01 * random(*x.shape, seed=3)), None),  # noise
        (lambda x: x + 0.1 * random(*x.shape, seed=3), None),
        (
            lambda x: random(*x.shape, seed=3),
            None,
        ),  # other values of the same distribution are no permutation
        (
            lambda x: x.clamp(-1.5, 1.5) * (1 + 1e-4 * random(*x.shape, seed=3)),
            None,
        ),  # not one magnitude
        (lambda x: x**3, None),
        (
            lambda x: torch.where(random(*x.shape, seed=5) > 0, 0.0, x),
            None,
        ),  # dropped at random: no tail
    ],
)
def test_near_misses(right, harm, label):
    found = structure(right, changed(right, harm), U)
    assert (found and found.label) == label, found


def test_the_end_of_the_memory_is_not_the_end_of_the_indices():
    right = random(4, 6, 9, 9).to(memory_format=torch.channels_last)
    actual = right.clone(memory_format=torch.preserve_format)
    actual.as_strided((actual.numel(),), (1,))[-243:] = 0
    described = structure(right.contiguous(), actual, U)
    label = described.label
    evidence = described.evidence
    assert label == "partly written output"
    assert (
        "of 1,944 elements are zero, from [3, 3, 4, 4] on" in evidence
    )  # 243 is half of 81 pixels of 6 channels


def test_the_index_of_a_transposed_tensor_is_its_own():
    right = random(40, 30).t()
    actual = right.clone()
    assert actual.stride() == (1, 30)
    actual[7, 33] = 99
    assert "first at [7, 33]: 99," in structure(right, actual, U).evidence


def test_one_value_has_a_factor_only_where_it_is_a_simple_ratio():
    two_thirds = "0.666667 (2/3) times what it should be"
    assert structure(torch.tensor(3.0), torch.tensor(2.0), U) == Structure(
        "constant factor",
        two_thirds,
    )
    assert structure(torch.tensor(3.0), torch.tensor(2.9123), U) is None
    assert structure(torch.tensor(3.0), torch.tensor(2.0), 2.0**-8) is None, (
        "in bf16 every number is near some ratio"
    )


def test_few_that_are_hardly_beyond_the_others_are_rounding():
    """Of many rounded values one is the worst."""
    right = random(20, 20).double()
    actual = right + 3 * U * right.abs()
    actual[3, 3] = right[3, 3] * (1 + 6 * U)
    assert structure(right, actual, U) is None


def test_infinities_and_nan_are_left_out(right):
    actual = (right * 2).clone()
    actual[0, 0, 0], actual[1, 1, 1] = torch.nan, torch.inf
    assert structure(right, actual, U).label == "constant factor"
    assert structure(torch.full((4, 4), torch.nan), right[0, :4, :4], U) is None


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (torch.zeros(0), torch.zeros(0)),
        (torch.zeros(0, 4), torch.zeros(0, 4)),
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(5, 5), torch.zeros(5, 5)),
        (torch.tensor(1.0), torch.tensor(1.0)),
        (torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)),
    ],
)
def test_nothing_to_describe(expected, actual):
    assert structure(expected, actual, U) is None
    assert usual_error(expected, actual) is None


def test_integers_booleans_and_complex_numbers():
    whole = torch.arange(1, 61).reshape(6, 10)
    assert structure(whole, whole * 3, 0.0) == Structure(
        "constant factor",
        "3 times what it should be",
    )
    assert structure(whole, whole + 2, 0.0).label == "constant offset"
    flags = random(30, 30) > 0
    broken = flags.clone()
    broken[4, 5] ^= True
    assert structure(flags, broken, 0.0).label == "corrupted elements"
    turning = torch.complex(random(6, 10), random(6, 10, seed=1))
    assert structure(turning, turning * 2, U).label == "constant factor"
    broken = turning.clone()
    broken[2, 3] = torch.tensor(50j)
    assert "first at [2, 3]" in structure(turning, broken, U).evidence
    assert structure(turning, broken.conj().conj(), U).label == "corrupted elements"


@pytest.mark.parametrize("shape", [(3000, 7), (7, 3000), (3, 2100, 3)])
def test_large_tensors_are_looked_at_in_part(monkeypatch, shape):
    monkeypatch.setattr(module, "LOOKED_AT", 2048)
    right = random(*shape)
    assert structure(right, right * 1.5, U) == Structure(
        "constant factor",
        "1.5 (3/2) times what it should be",
    )
    axis = shape.index(max(shape))
    actual = right.clone()
    actual.narrow(axis, shape[axis] // 2, shape[axis] - shape[axis] // 2).zero_()
    described = structure(right, actual, U)
    label = described.label
    evidence = described.evidence
    assert label == "partly written output"
    assert str(shape[axis] // 2)[:2] in evidence  # to the slice that was looked at
    turned = right.flatten().flip(0).reshape(shape)
    assert structure(right, turned, U) is None, "permutations are not seen in a part"


def test_many_thin_slices_are_not_compared_with_each_other():
    """A hundred rows of 60,000 against all of them would be millions of distances."""
    right = random(60_000, 4)
    actual = right.clone()
    actual[1000:1100] = random(100, 4, seed=5)
    assert structure(right, actual, U).label == "corrupted elements"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=0, max_size=4),
    st.integers(0, 5),
    st.floats(-4, 4),
    st.sampled_from([0, 1, 2]),
)
def test_never_fails_and_never_changes_what_it_is_given(shape, seed, factor, kind):
    right = random(*shape, seed=seed)
    actual = [
        right * factor,
        right + factor,
        torch.where(random(*shape, seed=seed + 1) > 0, right, factor),
    ][kind]
    kept = actual.clone()
    found = structure(right, actual, U)
    assert found is None or (found.label and found.evidence)
    assert torch.equal(actual, kept)


def test_fewer_digits():
    x = random(200)
    assert fewer_digits(x.double(), x.bfloat16().float(), U) == "bfloat16"
    assert fewer_digits(x.double(), x.half().float(), U) == "float16"
    assert fewer_digits(x.double(), x, U) is None
    mask = (x > 0).float()
    assert fewer_digits(1 - mask, mask, U) is None, (
        "what should be whole numbers, and is"
    )
    assert fewer_digits(x.double(), x.bfloat16(), 2.0**-8) is None, "the format itself"
    assert fewer_digits(x.double(), torch.zeros(200), U) is None
    assert (
        fewer_digits(x, torch.where(x > 0, torch.inf, x.bfloat16().float()), U)
        == "bfloat16"
    )


def test_usual_error():
    """The median of |normal| is 0.6745 standard deviations; of 10,000 draws within 5 standard errors, 0.6745 ± 0.04."""
    x = random(10_000).double()
    off = usual_error(x, x * (1 + 0.01 * random(10_000, seed=1)))
    assert math.isclose(off, 0.006745, rel_tol=0.06)
    assert usual_error(torch.zeros(4), torch.ones(4)) is None, "relative to nothing"


def test_complex_numbers_beside_real_ones_have_no_structure_in_common():
    real = random(4, 6)
    assert structure(torch.complex(real, real), real, U) is None
    assert structure(real, torch.complex(real, real), U) is None
