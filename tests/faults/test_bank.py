"""The bank is right about itself: each fault changes numbers, and first of all at the site it states."""

from __future__ import annotations

import functools

import polars as pl
import pytest
import torch

import roundoff
from roundoff.record.disk.schema import site_name

from . import FAULTS, Fault, clean_pairs, record
from .bank import write
from .program import FAMILIES, program

_SHOWN = ("step", "leaf", "phase", "site", "place", "dtype", "shape", "hash")


def rows(path) -> pl.DataFrame:
    """What tells two recordings apart, in the order of recording. Memory that nothing has written yet has no value."""
    table = roundoff.load(path).ops.sort("step", "record").collect()
    leaf = pl.col("call") == -1
    unwritten = pl.col("operator").str.contains("^(new_)?empty") | (
        (pl.col("operator") == "mkldnn_rnn_layer")
        & (pl.col("dtype") == "uint8")  # its workspace, with gaps
    )
    return table.select(
        *("step", "phase", "place", "dtype", "shape", leaf.alias("leaf")),
        site=pl.coalesce(pl.when(leaf).then("name"), site_name()),
        hash=pl.when(~unwritten).then("hash"),
    ).select(*_SHOWN)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The clean recording of a fault, made once for those that share it."""

    @functools.cache
    def usual(family, steps):
        folder = tmp_path_factory.mktemp("clean") / family
        write(functools.partial(program, family), folder, steps, keep="hash")
        return rows(folder)

    def of(fault: Fault) -> pl.DataFrame:
        if fault.usual:
            return usual(fault.family, fault.steps)
        folder = tmp_path_factory.mktemp("clean") / fault.name
        record(fault, folder, faulty=False, keep="hash")
        return rows(folder)

    return of


def test_names_are_unique_and_the_bank_is_broad():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 48
    assert {fault.family for fault in FAULTS} == set(FAMILIES)
    for group in ("constants", "code", "kernels", "precision", "training"):
        families = {f.family for f in FAULTS if f.break_it.__module__.endswith(group)}
        assert families == set(FAMILIES), f"{group} has only {families}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clean_program_run_twice_computes_the_same_bits(family, tmp_path):
    for name in ("once", "again"):
        write(functools.partial(program, family), tmp_path / name, 2, keep="hash")
    once, again = rows(tmp_path / "once"), rows(tmp_path / "again")
    assert once.equals(again)
    assert once["hash"].null_count() < 0.1 * once.height


def two_of_each() -> list[Fault]:
    """Two faults of each kind in each family; benchmarks/fault_bank.py compares all of them."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in FAULTS:
        groups.setdefault((fault.family, fault.break_it.__module__), []).append(fault)
    return [fault for group in groups.values() for fault in group[:2]]


@pytest.mark.parametrize("fault", two_of_each(), ids=lambda fault: fault.name)
def test_the_first_difference_is_at_the_true_site(fault, clean, tmp_path):
    """Both sides run the same code up to the fault: until then the same rows with the same bits, then its site."""
    record(fault, tmp_path / "candidate", faulty=True, keep="hash")
    sides = clean(fault), rows(tmp_path / "candidate")
    assert values(sides[0]) != values(sides[1]), "no value differs"

    if fault.break_it.__module__.endswith(
        "kernels"
    ):  # seen as the operators' own results
        assert sides[0].drop("hash").equals(sides[1].drop("hash"))

    # Leaves are recorded when they are first read, so their order says nothing; later steps' follow from the first.
    first, other = (
        dict(side.filter("leaf", step=0).select("site", "hash").rows())
        for side in sides
    )
    wrong = {
        name
        for name in first.keys() & other.keys()
        if "/" not in name and first[name] != other[name]
    }
    assert all(fault.named_by("forward", name) for name in wrong), wrong

    reference, candidate = (
        side.filter(~pl.col("leaf")).select(*_SHOWN[2:]).rows() for side in sides
    )
    pairs = zip(reference, candidate, strict=False)
    first = next(
        (i for i, (a, b) in enumerate(pairs) if a != b),
        min(len(reference), len(candidate)),
    )
    seen = [side[first] for side in (reference, candidate) if first < len(side)]
    assert wrong or any(fault.named_by(row[0], row[1]) for row in seen), seen


def values(table: pl.DataFrame) -> set[str | None]:
    return set(table["hash"])


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.random], ids=lambda fault: fault.name
)
def test_a_race_differs_from_itself(fault, tmp_path):
    for name in ("once", "again"):
        record(fault, tmp_path / name, faulty=True, keep="hash")
    assert not rows(tmp_path / "once").equals(rows(tmp_path / "again"))


_PAIRS = [
    p for p in clean_pairs() if p.family == "lstm" and "compiled" not in p.name
]  # compiling takes long


@pytest.mark.parametrize("pair", _PAIRS, ids=lambda pair: pair.name)
def test_what_a_clean_pair_runs_is_one_program(pair, tmp_path, request):
    """The loss agrees to the rounding of bf16 (unit roundoff 2^-8) in one of its terms: all else is above that."""
    if "bf16" in pair.name:
        request.getfixturevalue("bf16_lstm")
    pair.reference(tmp_path / "reference")
    pair.candidate(tmp_path / "candidate")
    runs = (roundoff.load(tmp_path / name) for name in ("reference", "candidate"))
    losses = [run.tensor("/nll_loss_forward").item() for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=2**-8)
    assert torch.get_num_threads() == 1
    assert torch.backends.mkldnn.enabled  # type: ignore[truthy-bool]
