"""One rank of two runs: columns and rows say the same, what is damaged is a row, and it is the same wherever it runs."""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from torch import nn

import roundoff
from roundoff.compare import rank_comparison
from roundoff.compare.judging.table import TABLE, whole
from roundoff.compare.step_comparison import compare_step
from roundoff.errors import RunError

RAY = importlib.util.find_spec("ray") is not None
STEPS = 3
#: What both ways to compare know; the quick one leaves out what only a difference has.
SAME = (
    "rank",
    "step",
    "phase",
    "site",
    "reference_site",
    "operator",
    "reference_operator",
    "place",
    "role",
    "name",
    "line",
    "reference_line",
    "record",
    "reference_record",
    "call",
    "view",
    "status",
    "dtype",
    "reference_dtype",
    "shape",
    "reference_shape",
    "numel",
    "equal",
    "cause",
    "verdict",
)


def record(
    folder,
    monkeypatch,
    *,
    ranks=(0, 1),
    steps=STEPS,
    wrong=None,
    keep="stats",
    noise=None,
):
    """A training of a small net on each rank; at step ``wrong`` of rank 1 a constant is another one."""
    monkeypatch.setenv("WORLD_SIZE", str(max(2, len(ranks))))
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        torch.manual_seed(rank)
        norm = nn.LayerNorm(16)
        model = nn.Sequential(nn.Linear(6, 16), norm, nn.GELU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with roundoff.capture(folder, model, keep=keep, noise=noise, leaves=0) as run:
            for step in range(steps):
                norm.eps = 0.5 if (rank, step) == (1, wrong) else 1e-5
                optimizer.zero_grad()
                model(
                    torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
                ).square().mean().backward()
                optimizer.step()
                run.step()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name, options in {
            "good": {},
            "same": {},
            "noisy": {"noise": 1},
            "wrong": {"wrong": 1},
            "two": {"steps": 2},
            "one": {"ranks": (0,)},
            "kept": {"keep": "tensors"},
            "kept_wrong": {"keep": "tensors", "wrong": 1},
        }.items():
            record(folder / name, patch, **options)
    return folder


def slowly(monkeypatch):
    monkeypatch.setattr(rank_comparison, "agreeing_steps", lambda *_: {})


@pytest.mark.parametrize("candidate", ["same", "noisy", "wrong"])
def test_columns_and_rows_say_the_same(runs, candidate, monkeypatch):
    quick = roundoff.compare(reference=runs / "good", candidate=runs / candidate)
    slowly(monkeypatch)
    full = roundoff.compare(reference=runs / "good", candidate=runs / candidate)
    assert_frame_equal(quick.table.select(SAME), full.table.select(SAME))
    errors = [c.table["error"].to_list() for c in (quick, full)]
    assert errors[0] == [
        e if e is None else pytest.approx(e, rel=1e-12) for e in errors[1]
    ]
    assert max(e for e in errors[0] if e is not None) > 0 or candidate == "same"
    assert quick.agrees == full.agrees == (candidate != "wrong")
    for key in ("status", "rows", "measured", "equal"):
        assert getattr(quick.coverage, key) == getattr(full.coverage, key)
    assert [c.site for c in quick.culprits()] == [c.site for c in full.culprits()]
    if candidate == "wrong":
        first = quick.divergence
        assert (first.site, first.rank, first.step) == (
            "1/native_layer_norm",
            1,
            1,
        )


@pytest.mark.parametrize(
    ("candidate", "expected"), [("noisy", []), ("wrong", [{(1, 1)}, {(1, 2)}])]
)
def test_columns_are_used_where_steps_agree(runs, monkeypatch, candidate, expected):
    """Rounding noise is no reason to go row by row; a fault is, from its step on, on its rank."""
    seen = []
    explain = compare_step

    def watched(sides, *arguments, **options):
        seen.append({(row.rank, row.step) for row in sides.candidate.rows.values()})
        return explain(sides, *arguments, **options)

    monkeypatch.setattr(rank_comparison, "compare_step", watched)
    roundoff.compare(reference=runs / "good", candidate=runs / candidate)
    assert seen == expected


def table_of(*arguments):
    result = rank_comparison.compare_rank(*arguments)
    return whole([result.table]), list(result.damage)


def test_a_rank_by_itself(runs):
    """What a machine of many computes are the rows of its rank."""
    whole_table = roundoff.compare(
        reference=runs / "kept", candidate=runs / "kept_wrong"
    ).table.drop("verdict")
    for rank in (0, 1):
        mine, damage = table_of(
            str(runs / "kept"),
            str(runs / "kept_wrong"),
            rank,
            range(STEPS),
            rank_comparison.Settings(),
        )
        assert damage == []
        assert dict(mine.schema) == TABLE
        assert_frame_equal(mine, whole_table.filter(rank=rank))


@pytest.mark.parametrize(
    ("keep", "file"),
    [
        ("", "ops.parquet"),
        ("", "checksums.json"),
        ("kept_", "ops.parquet"),
    ],
)
def test_a_damaged_step_is_a_row_and_the_rest_is_compared(runs, tmp_path, keep, file):
    reference, broken = runs / (keep.rstrip("_") or "good"), tmp_path / "broken"
    shutil.copytree(runs / f"{keep}wrong", broken)
    path = broken / "rank0" / "step000001" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = roundoff.compare(reference=reference, candidate=broken)
    rows = found.table.filter(status="damaged")
    assert rows.select("rank", "step", "verdict").rows() == [(0, 1, "undecided")]
    assert rows["reason"][0]
    (line,) = found.about.damage
    assert "step000001" in line
    assert found.divergence.site == "1/native_layer_norm"
    sound = roundoff.compare(reference=reference, candidate=runs / f"{keep}wrong")
    others = (pl.col("rank") == 1) | (pl.col("step") != 1)
    assert_frame_equal(
        found.table.filter(others).select(SAME), sound.table.filter(others).select(SAME)
    )
    assert found.coverage.status["damaged"] == 1


@pytest.mark.parametrize("search", ["agreeing_by_values", "compared_by_values"])
def test_by_name_all_stands_where_the_search_by_values_fails(runs, monkeypatch, search):
    def fails(*_):
        raise ValueError("of no use")

    sides = {"reference": runs / "kept", "candidate": runs / "kept_wrong"}
    sound = roundoff.compare(**sides)
    monkeypatch.setattr(rank_comparison, search, fails)
    found = roundoff.compare(**sides)
    assert_frame_equal(found.table.select(SAME), sound.table.select(SAME))
    for line in found.about.damage:
        assert "ValueError: of no use" in line
        assert line in found.answer
    assert len(found.about.damage) == len(set(found.about.damage)) > 0


def test_of_a_damaged_tensor_statistics_are_compared(runs, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(runs / "kept_wrong", broken)
    path = broken / "rank0" / "step000001" / "tensors-000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 255  # of the last tensor
    path.write_bytes(content)
    found = roundoff.compare(reference=runs / "kept", candidate=broken)
    (line,) = found.about.damage
    assert "step000001" in line
    assert "are not those that were written" in line
    assert found.divergence.site == "1/native_layer_norm"
    sound = roundoff.compare(reference=runs / "kept", candidate=runs / "kept_wrong")
    assert found.table.height == sound.table.height
    here = (
        (pl.col("rank") == 0)
        & (pl.col("step") == 1)
        & (pl.col("numel") > 0)
        & pl.col("error").is_not_null()
    )
    without = found.table.filter(here & pl.col("rel_l2").is_null())["record"]
    assert 0 < len(without) < sound.table.filter(here).height / 4  # views of it too
    assert not sound.table.filter(
        here & pl.col("rel_l2").is_null() & pl.col("record").is_in(without.implode())
    ).height


def test_special_values_of_equal_statistics(recorded):
    """The finite elements agree, in columns too; one run has NaN where the other has infinity."""
    one, other = (
        recorded(lambda last=last: torch.tensor([1.0, 2.0, last]).abs(), keep="stats")
        for last in (math.nan, math.inf)
    )
    found = roundoff.compare(reference=one, candidate=other)
    assert found.table.filter(operator="abs")["error"].to_list() == [math.inf]
    assert not found.agrees
    assert roundoff.compare(reference=one, candidate=one).agrees


def test_other_steps_and_ranks(runs):
    for reference, candidate, side in (
        ("good", "two", "reference"),
        ("two", "good", "candidate"),
    ):
        found = roundoff.compare(reference=runs / reference, candidate=runs / candidate)
        assert found.agrees
        lonely = found.table.filter(pl.col("site").is_null())
        assert lonely.select("step", "status", "reason", "verdict").rows() == [
            (2, f"only in {side}", "the other run has no step 2", "undecided")
        ]
        assert found.table["step"].drop_nulls().unique().sort().to_list() == [0, 1, 2]
        assert f"Only the {side} has step 2" in found.about.notes
    found = roundoff.compare(reference=runs / "good", candidate=runs / "one")
    assert found.table.filter(rank=1).select("status", "reason").rows() == [
        ("only in reference", "the other run has no rank 1")
    ]


def test_one_rank_and_step(runs):
    every = roundoff.compare(reference=runs / "good", candidate=runs / "wrong")
    some = roundoff.compare(
        reference=runs / "good", candidate=runs / "wrong", rank=1, step=1
    )
    assert_frame_equal(
        some.table.select(SAME), every.table.filter(rank=1, step=1).select(SAME)
    )
    with pytest.raises(RunError, match="the two runs have not both rank 7") as caught:
        roundoff.compare(reference=runs / "good", candidate=runs / "wrong", rank=7)
    assert "ranks 0 to 1 in the reference, ranks 0 to 1 in the candidate" in str(
        caught.value
    )


@pytest.mark.parametrize("name", ["kept_wrong", "wrong"])
def test_runs_at_urls(runs, name):
    reference = "kept" if name.startswith("kept") else "good"
    local = roundoff.compare(reference=runs / reference, candidate=runs / name)
    memory = fsspec.filesystem("memory")
    try:
        for run in (reference, name):
            memory.put(str(runs / run), f"/compared/{run}", recursive=True)
        for place in ("memory://compared/{}", f"file://{runs}/{{}}"):
            far = roundoff.compare(
                reference=place.format(reference), candidate=place.format(name)
            )
            assert_frame_equal(far.table, local.table)
            assert far.culprits() == local.culprits()
            assert far.about.reference == place.format(reference) or place.startswith(
                "file"
            )
    finally:
        memory.rm("/compared", recursive=True)


CLUSTER = """
import sys
import ray, roundoff
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="critical")
for place in range(1, len(sys.argv), 3):
    reference, candidate, result = sys.argv[place : place + 3]
    sides, done = {"reference": reference, "candidate": candidate}, []
    roundoff.compare(**sides, engine="ray", progress=lambda *at: done.append(at)).save(result)
    assert done == [(1, 2), (2, 2)], done
ray.shutdown()
"""


@pytest.mark.skipif(not RAY, reason="ray is not installed")
def test_on_a_cluster(runs, tmp_path):
    """Two workers of a cluster of this machine: the same table, to the last bit. In a process of its own, since one can
    join a single cluster with a token."""
    pairs = [("kept", "kept_wrong"), ("good", "wrong")]
    arguments = [
        str(folder)
        for pair in pairs
        for folder in (*(runs / name for name in pair), tmp_path / pair[0])
    ]
    path = os.pathsep.join(
        [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    )
    env = os.environ | {
        "PYTHONPATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    subprocess.run(
        [sys.executable, "-c", CLUSTER, *arguments], env=env, check=True, timeout=150
    )
    for reference, candidate in pairs:
        far = roundoff.Comparison.load(tmp_path / reference)
        local = roundoff.compare(reference=runs / reference, candidate=runs / candidate)
        assert_frame_equal(far.table, local.table)
        assert far.answer == local.answer
