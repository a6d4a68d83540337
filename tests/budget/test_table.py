"""Budget: its arithmetic on numbers made by hand, and its file."""

from __future__ import annotations

import json
import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.budget.noise_power import Term, absorbed, decibels, keeps, power
from roundoff.budget.table import Budget
from roundoff.errors import OutputError, PlanError


def term(values, *, pooled=False, part="output", sources=()):
    return Term(
        part, 0, tuple(sources), pooled, 0, np.asarray(values, dtype=np.float64)
    )


def test_projections_are_added_then_squared_averaged_over_probes_and_summed_over_samples():
    a, b = [[1, 2], [3, 4]], [[1, -2], [0, 1]]
    assert power([term(a)])[0] == (1 + 9) / 2 + (4 + 16) / 2
    # added: [[2, 0], [3, 5]]
    assert power([term(a), term(b)])[0] == (4 + 9) / 2 + (0 + 25) / 2


def test_a_pooled_projection_is_the_sum_over_its_batch():
    a, c = [[1, 2], [3, 4]], [[3], [1]]
    assert power([term(c, pooled=True)])[0] == (9 + 1) / 2
    # |a + c|^2 = |a|^2 + |c|^2 + 2 a c, each averaged over the probes: 15 + 5 + 2 (3 * 3 + 7 * 1) / 2
    assert power([term(a), term(c, pooled=True)])[0] == 15 + 5 + 16
    # two batches: their probes are independent, so the cross term takes the sums of both
    two = [[3, 1], [1, 1]]
    assert power([term(two, pooled=True)])[0] == (9 + 1) / 2 + (1 + 1) / 2
    assert (
        power([term(a), term(two, pooled=True)])[0] == 15 + 6 + 2 * (4 * 3 + 2 * 7) / 2
    )


def test_nothing_is_no_noise_and_infinity_is_all():
    assert power([]) == (0.0, 0.0)
    assert power([term([[np.inf, 1.0]])])[0] == math.inf
    assert (
        power([term([[np.inf]]), term([[-np.inf]])])[0] == math.inf
    )  # not a number otherwise
    assert (
        power([term([[1.0], [-1.0]], pooled=True), term([[-1.0], [1.0]], pooled=True)])[
            0
        ]
        == 0.0
    )


def test_the_standard_error_of_one_sample_comes_from_its_probes():
    squares = np.array([1.0, 4.0, 9.0, 16.0])
    noise, stderr = power([term(np.sqrt(squares)[:, None])])
    assert noise == 7.5
    # Gaussian projections of power P have squares of variance 2 P^2, and the estimate of
    # P^2 is 7.5^2 / (1 + 2/4): more than the spread of these four
    gaussian = math.sqrt(2 * 7.5**2 / 1.5 / 4)
    assert np.std(squares, ddof=1) / math.sqrt(4) < gaussian
    assert stderr == pytest.approx(gaussian, rel=1e-12)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31))
def test_any_mixture_of_pooled_and_single_terms_is_unbiased(seed):
    """Errors a and b of 3 samples with 2 outputs each: |a + b|^2 from 20000 sign vectors, b pooled or not.

    A mean of 20000 squares of relative variance at most 2: 5 sigma (20 seeds) is 5 %; pooled, cross products between
    samples add as much variance again as there are samples: sqrt(3) times that.
    """
    generator = np.random.default_rng(seed)
    a, b = generator.standard_normal((2, 3, 2))
    signs = generator.integers(0, 2, (20000, 3, 2)) * 2.0 - 1.0
    exact = float(((a + b) ** 2).sum())
    single = [term((signs * e).sum(2)) for e in (a, b)]
    pooled = term((signs * b).sum((1, 2))[:, None], pooled=True)
    scale = float((a**2).sum() + (b**2).sum())
    assert power(single)[0] == pytest.approx(exact, abs=0.05 * scale)
    assert power([single[0], pooled])[0] == pytest.approx(
        exact, abs=0.05 * math.sqrt(3) * scale
    )


@pytest.mark.parametrize(
    ("noise", "db"),
    [(1.0, 0.0), (1e-4, 40.0), (100.0, -20.0), (0.0, None), (math.inf, None)],
)
def test_decibels(noise, db):
    assert decibels(noise) == (None if db is None else pytest.approx(db, abs=1e-12))


@pytest.mark.parametrize(
    ("produced", "fmt", "kept"),
    [
        ("bf16", "bf16", True),
        ("bf16", "fp32", True),
        ("bf16", "tf32", True),  # 8 exponent bits, 7 of its 10 fraction bits
        ("bf16", "fp16", False),  # 1e38
        ("fp16", "bf16", False),  # 1 + 2**-10
        ("fp16", "tf32", True),
        ("fp32", "bf16", False),
        ("int8", "bf16", False),  # int8 leaves an fp32 output
        ("fp8_e4m3fn", "bf16", False),  # so does fp8
    ],
)
def test_which_results_a_cast_leaves_alone(produced, fmt, kept):
    assert keeps(produced, fmt) is kept


def test_an_operand_is_absorbed_where_everything_it_comes_from_ends_in_the_format():
    one = term([[1.0]], part="activation", sources=("a/linear",))
    both = term([[1.0]], part="activation", sources=("a/linear", "b/add"))
    assert absorbed(one, "bf16", {"a/linear": "bf16"})
    assert not absorbed(one, "bf16", {"a/linear": "fp16"})
    assert not absorbed(one, "bf16", {})  # a stays in fp32
    assert not absorbed(both, "bf16", {"a/linear": "bf16"})
    assert absorbed(both, "bf16", {"a/linear": "bf16", "b/add": "bf16"})
    assert not absorbed(one, "int8", {"a/linear": "int8"})  # scaled again
    for kept in (
        term([[1.0]], part="activation"),  # an input
        term([[1.0]], part="activation", sources=("", "a/linear")),  # an input mixed in
        term([[1.0]], part="weight", sources=("a.weight",)),
        term([[1.0]], part="output"),
    ):
        assert not absorbed(kept, "bf16", {"a/linear": "bf16"})


@pytest.fixture
def small(made):
    """Two linear layers, one after the other, and a sum; powers are whole numbers of 1e-4."""
    e = 0.01
    new = made(["bf16", "int8"], probes=2, batch_samples=[1, 1])
    new.site("a/linear", params=["a.weight"]).site("b/linear", params=["b.weight"])
    new.site(
        "/add",
        "elementwise",
        refused={"int8": "no int8 arithmetic for elementwise operators"},
    )
    new.term(
        "a/linear", "bf16", "activation", [[e, 0], [-e, 0]]
    )  # 1e-4, all in the first batch
    new.term(
        "a/linear",
        "bf16",
        "weight",
        [[0, 2 * e], [0, 2 * e]],
        operand=1,
        sources=["a.weight"],
    )  # 4e-4
    new.term("a/linear", "bf16", "output", [[0, 0], [0, 0]])
    new.term(
        "b/linear", "bf16", "activation", [[3 * e, 0], [3 * e, 0]], sources=["a/linear"]
    )  # 9e-4
    new.term("b/linear", "bf16", "output", [[0, e], [0, e]])  # 1e-4
    new.term(
        "a/linear",
        "int8",
        "weight",
        [[np.inf, 0], [0, 0]],
        operand=1,
        sources=["a.weight"],
        overflow=3,
    )
    new.term(
        "b/linear", "int8", "weight", [[e, e], [e, -e]], operand=1, sources=["b.weight"]
    )  # 2e-4
    new.term(
        "/add", "bf16", "activation", [[0, 0], [0, 0]], sources=["a/linear", "b/linear"]
    )
    return new.budget()


def test_the_table(small):
    rows = {(r["site"], r["format"]): r for r in small.table.to_dicts()}
    assert len(rows) == 5
    b = rows["b/linear", "bf16"]
    assert b["noise"] == pytest.approx(
        10e-4, rel=1e-6
    )  # the projections are kept in fp32
    assert b["sqnr_db"] == pytest.approx(30.0, abs=1e-5)
    assert b["activation_db"] == pytest.approx(-10 * math.log10(9e-4), abs=1e-5)
    assert b["output_db"] == pytest.approx(40.0, abs=1e-5)
    assert b["weight_db"] is None  # bf16 has no weight term here
    assert b["share"] == pytest.approx(10 / 15, rel=1e-6)
    assert (b["operator"], b["kind"], b["note"]) == ("linear", "linear", "")
    a = rows["a/linear", "bf16"]
    assert (a["noise"], a["output_db"]) == (
        pytest.approx(5e-4, rel=1e-6),
        None,
    )  # an output without error
    lost = rows["a/linear", "int8"]
    assert (lost["noise"], lost["sqnr_db"], lost["share"]) == (math.inf, None, 1.0)
    assert lost["note"] == "overflow: 3 elements"
    assert (rows["/add", "bf16"]["note"], rows["/add", "bf16"]["share"]) == (
        "exact",
        0.0,
    )
    assert small.table["noise"].to_list() == sorted(small.table["noise"], reverse=True)


def test_costs_that_differ_by_rounding_alone_stand_in_the_order_of_their_names(made):
    e = 0.01
    new = made(["bf16"], probes=2, batch_samples=[1])
    for name, size in (("z", e), ("a", e * (1 + 1e-9)), ("b", e), ("m", 1.001 * e)):
        new.site(name)
        new.term(name, "bf16", "output", [[size], [-size]])
    # m is larger by 0.2 %; the others differ by 2e-9, less than a sum in fp32 can say
    assert [cost.site for cost in new.budget().costs] == ["m", "a", "b", "z"]


def test_parameters(small):
    rows = {
        (r["parameter"], r["format"]): r["noise"] for r in small.parameters.to_dicts()
    }
    assert rows == {
        ("a.weight", "bf16"): pytest.approx(4e-4, rel=1e-6),
        ("a.weight", "int8"): math.inf,
        ("b.weight", "int8"): pytest.approx(2e-4, rel=1e-6),
    }


def test_predictions(small):
    assert small.predict({}).db == small.predict({}).additive_db == math.inf
    assert small.predict({"b/linear": "bf16"}).additive == pytest.approx(
        10e-4, rel=1e-6
    )
    # with a in bf16, its result is a bf16 number: casting b's operand changes nothing
    assert small.predict(
        {"a/linear": "bf16", "b/linear": "bf16"}
    ).additive == pytest.approx(6e-4, rel=1e-6)
    assert small.predict({"a/linear": "int8"}).db == -math.inf
    assert (
        small.predict({"/add": "int8", "unknown/site": "bf16"}).noise == 0.0
    )  # no such rows


def test_predictions_of_one_batch(small):
    """Relative to the power of that batch, which is half of the whole here."""
    formats = {"a/linear": "bf16", "b/linear": "bf16"}
    assert small.predict(formats, batch=0).additive == pytest.approx(
        1e-4 / 0.5, rel=1e-6
    )
    assert small.predict(formats, batch=1).additive == pytest.approx(
        (4e-4 + 1e-4) / 0.5, rel=1e-6
    )


def test_correlations_count_where_they_stand_out(made):
    """Errors that are one and the same add as amplitudes (4 times the power), opposite ones cancel, independent ones add
    as powers. 4000 probes of one sample; the shrinkage takes the share stderr^2 / cross^2 of a cross term, 1e-3 here."""
    generator = np.random.default_rng(0)
    one, other = generator.choice(
        [-1.0, 1.0], (2, 4000, 6)
    ) @ generator.standard_normal(6)
    new = made(["bf16"], probes=4000, batch_samples=[1])
    for name, values in (("x/a", one), ("x/b", one), ("x/c", -one), ("x/d", other)):
        new.site(name).term(name, "bf16", "output", values)
    found = new.budget()
    single = float(np.square(one).mean())
    alike = found.predict({"x/a": "bf16", "x/b": "bf16"})
    assert alike.additive == pytest.approx(2 * single, rel=1e-5)
    assert alike.noise == pytest.approx(4 * single, rel=0.005)
    assert found.predict({"x/a": "bf16", "x/c": "bf16"}).noise == pytest.approx(
        0.0, abs=0.005 * single
    )
    apart = found.predict({"x/a": "bf16", "x/d": "bf16"})
    # the cross term is noise of relative size 2 / sqrt(4000), of which the shrinkage keeps less than all
    assert abs(apart.noise - apart.additive) < 4 * 2 / math.sqrt(4000) * single


def test_the_file_comes_back_equal(small, tmp_path):
    small.save(tmp_path / "deep" / "budget.parquet")
    loaded = Budget.load(tmp_path / "deep" / "budget.parquet")
    assert loaded.terms.equals(small.terms)
    assert loaded.sites == small.sites
    assert loaded.about == small.about
    assert loaded.table.equals(small.table)
    assert pl.read_parquet(tmp_path / "deep" / "budget.parquet").columns == list(
        small.terms.columns
    )


def test_what_is_not_finite_stays_out_of_the_metadata(small, tmp_path):
    stored = tmp_path / "b.parquet"
    small.save(stored)
    json.loads(pl.read_parquet_metadata(stored)["roundoff"], parse_constant=pytest.fail)


def broken(tmp_path, small, how):
    path = tmp_path / "budget.parquet"
    if how == "text":
        path.write_text("not parquet")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        small.save(path)
        path.write_bytes(path.read_bytes()[:-40])
    elif how == "other parquet":
        pl.DataFrame({"a": [1]}).write_parquet(path)
    elif how == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    "how", ["missing", "text", "empty", "cut", "other parquet", "folder"]
)
def test_a_file_that_is_no_budget(tmp_path, small, how):
    path = broken(tmp_path, small, how)
    with pytest.raises(PlanError) as error:
        Budget.load(path)
    text = str(error.value)
    assert f"{path}: not a readable budget" in text
    assert "roundoff budget WORKLOAD.py -o budget.parquet" in text


def test_saving_where_one_may_not(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        small.save(tmp_path / "file" / "b.parquet")
