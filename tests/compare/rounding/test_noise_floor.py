"""The floor under a comparison, and what does not repeat itself, on recorded programs and on tables written by hand."""

from __future__ import annotations

import math
import shutil

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff
from roundoff.compare.rounding.noise_floor import (
    KEY,
    noise_floor,
    own_tensor,
    relative_distance,
)
from roundoff.compare.rounding.reproducibility import (
    GPU,
    OUTSIDE,
    RANDOM,
    UNKNOWN,
    unstable,
)
from roundoff.errors import RunError
from roundoff.ops import operators_that
from roundoff.record.disk.siblings import siblings
from roundoff.record.disk.writer import Writer


def train(run, *, seed=0, mean=None):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(5, 6)
        loss = (mean or torch.mean)(F.dropout(net(x), 0.3).square())
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.step()


def record(path, work=train, **options):
    with roundoff.capture(path, overwrite=True, **options) as run:
        work(run)
    return roundoff.load(path)


def once(function):
    def work(run):
        function()
        run.step()

    return work


def written(path, **columns):
    """A run with one step, its statistics as given."""
    count = len(next(iter(columns.values())))
    usual = {
        "record": range(count),
        "call": range(count),
        "phase": ["forward"] * count,
        "module": [""] * count,
        "operator": ["mul"] * count,
        "index": range(count),
        "place": [0] * count,
        "dtype": ["float32"] * count,
        "shape": [[4]] * count,
        "numel": [4] * count,
        "nan": [0] * count,
        "posinf": [0] * count,
        "neginf": [0] * count,
        "inputs": [[]] * count,
    }
    with Writer(path, about={}) as writer:
        writer.write_step(0, {k: list(v) for k, v in (usual | columns).items()})
    return roundoff.load(path)


@pytest.mark.parametrize("keep", ["tensors", "sample"])
def test_the_floor_of_each_row(tmp_path, keep):
    """Against numpy in fp64, row by row."""
    reference = record(tmp_path / "a", keep=keep)
    others = [
        record(tmp_path / f"n{seed}", keep=keep, noise=seed) for seed in (1, 2, 3)
    ]
    found = noise_floor(reference, others)
    ops = reference.ops.collect()
    assert found.height == ops.height
    assert set(found["measure"].drop_nulls()) == {keep}
    checked = 0
    tables = [other.ops.collect() for other in others]
    for place, row in enumerate(found.iter_rows(named=True)):
        if row["reason"] == "uninitialised memory":
            operator = ops.row(place, named=True)["operator"]
            assert (
                operator.startswith("empty")
                or ops.row(place, named=True)["view_of"] is not None
            )
            assert row["floor"] is None
            continue
        x = reference.kept(own_tensor(ops.row(place, named=True))).double().numpy()
        ys = [
            other.kept(own_tensor(table.row(place, named=True))).double().numpy()
            for other, table in zip(others, tables, strict=True)
        ]
        size = np.linalg.norm(x)
        expected = [np.linalg.norm(x - y) / size if size else 0.0 for y in ys]
        assert row["runs"] == 3
        # fp64 norms of a few elements
        assert row["floor"] == pytest.approx(max(expected), rel=1e-12)
        assert row["rms"] == pytest.approx(
            math.sqrt(sum(e * e for e in expected) / 3), rel=1e-12
        )
        checked += bool(max(expected) > 0)
    assert checked > 20
    assert found.filter(operator="randn")["floor"].to_list() == [0.0, 0.0]
    assert found.filter(operator="addmm", phase="forward")["floor"].min() > 0


def test_the_floor_of_one_rounding(tmp_path):
    """Each of n elements in [1, 2) moves by 2**-23 with probability 1/2: |d|² is binomial, n/2 +- sqrt(n)/2 of 2**-46."""
    n = 4096
    x = torch.rand(n, generator=torch.Generator().manual_seed(5)) + 1
    reference = record(tmp_path / "a", once(lambda: x * 1.0 * x), keep="tensors")
    others = [
        record(tmp_path / f"n{s}", once(lambda: x * 1.0 * x), keep="tensors", noise=s)
        for s in (1, 2)
    ]
    found = noise_floor(reference, others).filter(operator="mul")
    assert found["floor"][0] == 0  # times one rounds nothing
    ulp = torch.where(x * x < 2, 2.0**-23, 2.0**-22).double()
    expected = math.sqrt((ulp**2).sum().item() / 2) / (x * x).double().norm().item()
    # 3 sigma of the square: 3 * 4 / (2 sqrt n) at most, where all weight is on elements with the larger ulp
    assert found["rms"][1] == pytest.approx(expected, rel=6 / math.sqrt(n))


def test_from_statistics(tmp_path):
    names = "l2", "mean", "std", "min", "max"
    a = [
        (2.0, 0.5, 1.0, -4.0, 2.0),
        (2.0, 0.0, 1.0, -1.0, 1.0),
        (2.0, 1.0, 0.0, 1.0, 1.0),
        (0.0,) * 5,
        (0.0,) * 5,
    ]
    b = [
        (2.0, 0.75, 1.0, -4.0, 2.5),
        (2.5, 0.0, 1.0, -1.0, 1.0),
        (2.0, 1.0, 0.125, 1.0, 1.0),
        (0.0,) * 5,
        (1.0, 0.5, 0.0, 0.5, 0.5),
    ]
    one = written(tmp_path / "a", **dict(zip(names, zip(*a, strict=True), strict=True)))
    two = written(tmp_path / "b", **dict(zip(names, zip(*b, strict=True), strict=True)))
    found = noise_floor(one, [two])
    # rms is l2 / sqrt(4); first row: mean 0.25 / 1, max 0.5 / 4; second: l2 0.5 / 2; third: std 0.125 / 1
    assert found["floor"].to_list() == [0.25, 0.25, 0.125, 0.0, None]
    assert found["runs"].to_list() == [1, 1, 1, 1, 0]
    assert found["measure"].to_list() == ["statistics"] * 4 + [None]
    assert found["reason"].to_list() == [None] * 4 + [
        "the reference is zero, the other is not"
    ]
    both = noise_floor(one, [two, one])
    assert both["rms"].to_list() == pytest.approx(
        [0.25 / math.sqrt(2), 0.25 / math.sqrt(2), 0.125 / math.sqrt(2), 0, 0]
    )
    assert both["runs"].to_list() == [2, 2, 2, 2, 1]
    assert both["reason"][4] == "the reference is zero, the other is not"


def test_reasons(tmp_path):
    nothing = {n: [None] * 4 for n in ("l2", "mean", "std", "min", "max")}
    one = written(
        tmp_path / "a",
        **nothing,
        nan=[4, 1, 4, None],
        reason=[None, None, None, "its memory was freed"],
    )
    two = written(
        tmp_path / "b",
        **nothing,
        nan=[4, 4, 4, None],
        shape=[[4], [4], [2, 2], [4]],
        reason=[None] * 4,
    )
    found = noise_floor(one, [two])
    assert found["floor"].to_list() == [0.0, None, None, None]
    assert found["reason"].to_list() == [
        None,
        "NaN or Inf in other places",
        "another shape",
        "its memory was freed",
    ]
    fewer = written(tmp_path / "c", l2=[1.0])
    assert (
        noise_floor(one, [fewer])["reason"].to_list()[1:3]
        == ["not in the other run"] * 2
    )


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], (0.0, None)),
        ([3.0, 4.0], [3.0, 4.5], (0.1, None)),
        ([0.0, -0.0], [0.0, 0.0], (0.0, None)),
        ([], [], (0.0, None)),
        ([math.nan, 3.0, -math.inf], [math.nan, 3.0, -math.inf], (0.0, None)),
        ([math.nan, 3.0], [3.0, math.nan], (None, "NaN or Inf in other places")),
        ([math.inf], [-math.inf], (None, "NaN or Inf in other places")),
        ([0.0], [1e-30], (None, "the reference is zero, the other is not")),
        ([1.0], [1.0, 1.0], (None, "another shape")),
        ([1e300], [1.5e300], (0.5, None)),
        ([True, False], [True, True], (1.0, None)),
        ([3, 4], [3, 5], (0.2, None)),
        ([3 + 4j], [0j], (1.0, None)),
    ],
)
def test_relative(x, y, expected):
    wide = torch.float64 if not x or isinstance(x[0], float) else None
    assert (
        relative_distance(torch.tensor(x, dtype=wide), torch.tensor(y, dtype=wide))
        == expected
    )


def test_a_damaged_tensor_is_a_reason(tmp_path):
    reference = record(tmp_path / "a", keep="tensors")
    other = record(tmp_path / "b", keep="tensors")
    (file,) = (tmp_path / "b" / "rank0" / "step000000").glob("tensors-*")
    file.write_bytes(file.read_bytes()[:-8])
    found = noise_floor(reference, [other])
    assert (
        found.filter(pl.col("step") == 1, pl.col("operator") == "addmm")["floor"]
        .drop_nulls()
        .len()
        > 0
    )
    assert all(
        file.name in r
        for r in found.filter(pl.col("step") == 0, pl.col("operator") == "addmm")[
            "reason"
        ]
    )


def test_without_others(tmp_path):
    reference = record(tmp_path / "a")
    for function in (noise_floor, unstable):
        with pytest.raises(
            RunError, match="no other run of the same program"
        ) as caught:
            function(reference, [])
        assert "--repeats 2" in str(caught.value)


@pytest.mark.parametrize("keep", ["stats", "tensors", "sample", "hash"])
def test_a_clean_program_repeats_itself(tmp_path, keep):
    reference = record(tmp_path / "a", keep=keep)
    repeats = [record(tmp_path / f"r{i}", keep=keep) for i in (1, 2)]
    found = unstable(reference, repeats)
    assert found.height == 0, found.select("phase", "site", "note")
    floor = noise_floor(reference, repeats)
    assert floor["floor"].drop_nulls().max() == 0


@pytest.mark.parametrize("keep", ["stats", "tensors", "hash"])
def test_an_unseeded_draw_is_found(tmp_path, keep):
    def work(run, seed):
        torch.manual_seed(0)
        net, x = nn.Linear(6, 4), torch.randn(5, 6)
        generator = torch.Generator().manual_seed(
            seed
        )  # a stream of its own that nobody has seeded alike
        loss = net(x).mul(torch.rand(5, 4, generator=generator)).sum()
        loss.backward()
        run.step()

    runs = [
        record(tmp_path / f"r{s}", lambda run, s=s: work(run, s), keep=keep)
        for s in (1, 2, 3)
    ]
    found = unstable(runs[0], runs[1:])
    assert found.select("phase", "operator", "runs", "note").rows() == [
        ("forward", "rand", 2, RANDOM)
    ]
    assert "test_noise_floor.py:" in found["line"][0]
    assert found["difference"][0] > 0.01


def test_an_operator_that_does_not_repeat_itself(tmp_path):
    """One that keeps state outside of tensors, and one that is known for it, by name and by line."""
    calls = []

    @torch.library.custom_op("roundoff_test::drifts", mutates_args=())
    def drifts(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * (1 + 1e-3 * len(calls))

    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    runs = [
        record(
            tmp_path / f"r{i}",
            once(lambda: drifts(x.exp()).sum().sqrt_()),
            keep="tensors",
        )
        for i in range(2)
    ]
    found = unstable(runs[0], runs[1:])
    assert found.select("operator", "note").rows() == [
        ("roundoff_test::drifts", UNKNOWN)
    ]
    assert found["difference"][0] == pytest.approx(
        1e-3 / 1.001, rel=1e-4
    )  # fp32 elements: 2**-24 of 1e-3


def test_memory_that_nobody_has_written_is_no_finding(tmp_path):
    """What it holds differs from run to run, also seen through a view; what was then written into it counts."""
    kernel = {
        "operator": ["empty", "detach", "fill_", "mul"],
        "view_of": [None, 0, None, None],
        "inputs": [[], [0], [1], [2]],
    }
    one = written(tmp_path / "a", l2=[5.0, 5.0, 1.0, 1.0], **kernel)
    two = written(tmp_path / "b", l2=[6.0, 6.0, 1.0, 1.0], **kernel)
    assert unstable(one, [two]).height == 0
    assert noise_floor(one, [two])["floor"].to_list() == [None, None, 0.0, 0.0]
    three = written(tmp_path / "c", l2=[6.0, 6.0, 2.0, 2.0], **kernel)
    assert unstable(one, [three])["operator"].to_list() == ["fill_"]


def test_other_data_is_told_from_operators(tmp_path):
    data = [torch.from_numpy(np.full(3, value)) for value in (1.0, 2.0)]
    runs = [
        record(tmp_path / f"r{i}", once(lambda x=x: x.sin().cos()))
        for i, x in enumerate(data)
    ]
    found = unstable(runs[0], runs[1:])
    assert found.filter(operator="input")["note"].to_list() == [OUTSIDE]
    assert found.filter(pl.col("operator").is_in(["sin", "cos"])).height == 0


def test_known_operators_have_their_note(tmp_path):
    kernel = {
        "operator": ["index_add_", "mul"],
        "overload": ["aten.index_add_.default", "aten.mul.Tensor"],
        "index": [0, 0],
        "inputs": [[], [0]],
    }
    one = written(tmp_path / "a", l2=[1.0, 1.0], **kernel)
    two = written(tmp_path / "b", l2=[1.5, 3.0], **kernel)
    assert unstable(one, [two]).select("site", "note", "difference").rows() == [
        ("/index_add_", GPU, 0.5)
    ]


def test_a_missing_call_and_other_inputs(tmp_path):
    one = written(tmp_path / "a", l2=[1.0, 2.0, 3.0], inputs=[[], [0], [1]])
    two = written(tmp_path / "b", l2=[1.0, 2.0], inputs=[[], [0]])
    found = unstable(one, [two])
    assert found["index"].to_list() == [2]
    assert found["reason"].to_list() == ["not in the other run"]
    swapped = written(tmp_path / "c", l2=[1.0, 2.0, 4.0], inputs=[[], [0], [0]])
    assert (
        unstable(one, [swapped]).height == 0
    )  # its input is another value: control flow, found where that began


def test_names_of_known_operators_are_torchs():
    names = {
        n.partition("::")[2].partition(".")[0].removesuffix("_")
        for n in torch._C._dispatch_get_all_op_names()
    }
    assert operators_that("vary on CUDA") - names <= {"_cudnn_ctc_loss"}


def test_siblings(tmp_path):
    main = record(tmp_path / "a+b")
    of = main.about.id
    for name, whose in (
        ("a+b.noise10", of),
        ("a+b.noise2", of),
        ("a+b.repeat1", of),
        ("a+b.noise3", "another"),
        ("a+b.noise", of),
        ("aab.noise1", of),
        ("a+b.repeat1.noise1", of),
    ):
        with Writer(tmp_path / name, about={"of": whose}):
            pass
    (tmp_path / "a+b.repeat2").mkdir()
    (tmp_path / "a+b.repeat3").write_text("a file")
    found = siblings(tmp_path / "a+b")
    assert {k: [p.name for p in v] for k, v in found.items()} == {
        "noise": ["a+b.noise2", "a+b.noise10"],
        "repeat": ["a+b.repeat1"],
    }
    assert siblings(tmp_path / "nothing") == {"noise": [], "repeat": []}
    shutil.rmtree(tmp_path / "a+b.noise2" / "rank0")
    (tmp_path / "a+b.noise2" / "run.json").write_text("{")
    with pytest.raises(RunError, match="noise2"):
        siblings(tmp_path / "a+b")


def test_keys_are_unique(tmp_path):
    """Otherwise a row would have several floors."""
    ops = record(tmp_path / "a").ops.collect()
    assert ops.select(KEY).is_unique().all()
