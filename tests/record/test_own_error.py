"""Own errors against exact arithmetic, and at values that are not finite."""

import math

import mpmath
import pytest
import torch

from roundoff.ops.rerun import run_again
from roundoff.record.own_error import OwnError, own_error

aten = torch.ops.aten
inf, nan = math.inf, math.nan


@pytest.fixture(autouse=True)
def _digits():
    with mpmath.workdps(50):
        yield


def exact(tensor):
    return [mpmath.mpf(v) for v in tensor.double().flatten().tolist()]


def dot(x, y):
    return [mpmath.fdot(exact(x), exact(y))]


def softmax(x):
    powers = [mpmath.exp(v) for v in exact(x)]
    return [p / mpmath.fsum(powers) for p in powers]


def layer_norm(x):
    values = exact(x)
    mean = mpmath.fsum(values) / len(values)
    var = mpmath.fsum((v - mean) ** 2 for v in values) / len(values)
    return [(v - mean) / mpmath.sqrt(var + mpmath.mpf(1e-5)) for v in values]


x, y = torch.linspace(-2, 3, 37), torch.linspace(0.3, 1.7, 37)
CASES = {
    "dot": (aten.dot.default, (x, y), dot, (x, y)),
    "softmax": (aten._softmax.default, (x, 0, False), softmax, (x,)),
    "layer_norm": (
        aten.native_layer_norm.default,
        (x, [37], None, None, 1e-5),
        layer_norm,
        (x,),
    ),
    "erf": (aten.erf.default, (x,), lambda x: [mpmath.erf(v) for v in exact(x)], (x,)),
    "logsumexp": (
        aten.logsumexp.default,
        (x, [0]),
        lambda x: [mpmath.log(mpmath.fsum(map(mpmath.exp, exact(x))))],
        (x,),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_fifty_digits(name, dtype):
    func, args, true, given = CASES[name]
    args = tuple(a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args)
    expected = true(*(g.to(dtype) for g in given))
    actual = func(*args)
    actual = actual[0] if isinstance(actual, tuple) else actual
    error = own_error([actual], run_again(func, args, {})[:1])[0]
    difference = [a - e for a, e in zip(exact(actual), expected, strict=True)]
    size = mpmath.sqrt(mpmath.fsum(e**2 for e in expected))
    # fp64's own error: at most 37 roundings of 2**-53, of terms up to 37 times the result's size
    slack = float(37 * 37 * mpmath.mpf(2) ** -53 * (size + max(map(abs, exact(x)))))
    assert error.l2 == pytest.approx(
        float(mpmath.sqrt(mpmath.fsum(d**2 for d in difference))), abs=slack
    )
    assert error.max == pytest.approx(float(max(map(abs, difference))), abs=slack)
    assert error.reference == pytest.approx(float(size), abs=slack)


def test_values_that_are_not_finite():
    def error(actual, again):
        return own_error(
            torch.tensor(actual), torch.tensor(again, dtype=torch.float64)
        )[0]

    assert error([nan, inf, -inf, 3.5], [nan, inf, -inf, 3.0]) == OwnError(
        0.5, 0.5, 3.0
    )
    assert error([inf, 1.0], [-inf, 1.0]) == OwnError(inf, inf, 1.0)
    assert error([nan, 1.0], [2.0, 1.0]).max == inf
    assert error([1.0], [nan]) == OwnError(inf, inf, 0.0)
    assert error([0.0], [1e-300]) == OwnError(1e-300, 1e-300, 1e-300)
    assert error([0.0, 0.0], [3e200, 4e200]).l2 == pytest.approx(
        5e200
    )  # squares overflow
    assert error([0.0, 0.0], [3e-200, 4e-200]).l2 == pytest.approx(
        5e-200
    )  # squares vanish


def test_overflow_of_an_operator_is_infinite_and_inherited_infinities_are_not():
    big = torch.tensor([60000.0, 1.0]).half()
    [own] = own_error(
        aten.mul.Tensor(big, big), run_again(aten.mul.Tensor, (big, big), {})
    )
    assert own == OwnError(inf, inf, pytest.approx(60000.0**2))
    infinite = torch.tensor([inf, 1.0]).half()
    [inherited] = own_error(
        aten.mul.Tensor(infinite, big), run_again(aten.mul.Tensor, (infinite, big), {})
    )
    assert inherited == OwnError(0.0, 0.0, 1.0)


def test_lists_shapes_and_other_kinds():
    a, b = torch.ones(2), torch.zeros(3)
    assert own_error([a, None, b], [a, b]) == [
        OwnError(0, 0, math.sqrt(2)),
        OwnError(0, 0, 0),
    ]
    assert own_error([a, b], [a]) == [OwnError(0, 0, math.sqrt(2)), None]
    assert own_error([a, b], [b, b])[0] is None
    assert own_error(a, [a, b]) == [None]
    assert own_error(torch.ones(0), torch.ones(0)) == [OwnError(0, 0, 0)]
    assert own_error(torch.tensor([True, False]), torch.tensor([True, True])) == [
        OwnError(1, 1, math.sqrt(2))
    ]
    assert own_error(torch.tensor([5]), torch.tensor([2])) == [OwnError(3, 3, 2)]
    assert own_error(torch.tensor([3 + 4j]), torch.tensor([0j])) == [OwnError(5, 5, 0)]
    assert own_error(torch.eye(2).to_sparse(), torch.zeros(2, 2)) == [
        OwnError(math.sqrt(2), 1, 0)
    ]
    assert own_error(
        torch.tensor([1.5]).to(torch.float8_e4m3fn), torch.tensor([1.0])
    ) == [OwnError(0.5, 0.5, 1)]
    z = torch.tensor([1 + 1j])
    assert own_error(z.conj(), z.conj().resolve_conj()) == [
        OwnError(0, 0, math.sqrt(2))
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("change", ["none", "same", "nan", "inf", "tiny", "permuted"])
def test_large_tensors_in_one_pass_as_element_by_element(dtype, change):
    torch.manual_seed(0)
    reference = torch.randn(70, 1031, dtype=torch.float64)
    if change == "permuted":
        reference = reference.T
    if change == "tiny":
        reference = reference * 1e-160
    if change == "same":
        reference = reference.to(dtype).double()
    actual = reference.to(dtype)
    if change in ("nan", "inf"):
        actual[3, 5] = float(change)
    (found,) = own_error(actual, reference)
    off = (actual.double() - reference).abs()
    if change in ("nan", "inf"):
        assert found.l2 == found.max == inf
    else:
        # sums of 72,170 squares in fp64, in another order
        l2 = torch.linalg.vector_norm(off / off.amax().clamp(min=1e-300)) * off.amax()
        assert found.l2 == pytest.approx(float(l2), rel=1e-12)
        assert found.max == float(off.amax())
    size = reference.abs()
    assert found.reference == pytest.approx(
        float(torch.linalg.vector_norm(size / size.amax()) * size.amax()), rel=1e-12
    )


def test_a_complex_result_against_a_real_one():
    one = torch.tensor([3.0, 1.0])
    other = torch.tensor([3.0 + 4.0j, 1.0 + 0.0j], dtype=torch.complex128)
    for actual, again in ((one, other), (other, one)):
        [error] = own_error(actual, again)
        assert error is not None
        assert (error.l2, error.max) == (4.0, 4.0)
