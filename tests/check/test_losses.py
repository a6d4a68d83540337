"""Losses: by repeats or by a derived bound, and from which step on; what was not recorded."""

from __future__ import annotations

import json
import math

import pytest
import torch

import roundoff
from roundoff.check import check_baseline
from roundoff.check.findings import LossCurves
from roundoff.check.losses import relative
from roundoff.cli.app import main
from roundoff.errors import RoundoffError


def record(path, losses, **options):
    """Record steps whose losses are these."""
    with roundoff.capture(path, **options) as run:
        for loss in losses:
            weight = torch.ones(1, requires_grad=True)
            (weight * torch.tensor([loss])).sum().backward()
            run.step()
    return path


def test_losses_part_at_the_first_step_beyond_repeats(tmp_path):
    ours = record(tmp_path / "a", [1.0, 0.5, 0.25])
    again = record(tmp_path / "again", [1.0, 0.505, 0.25])
    near = record(tmp_path / "near", [1.0, 0.51, 0.254])
    far = record(tmp_path / "far", [1.0, 0.51, 0.2])
    losses = roundoff.check(ours, near, repeats=[again]).losses
    assert (losses.bound, losses.differs, losses.steps) == ("repeats", False, 3)
    losses = roundoff.check(ours, far, repeats=[again]).losses
    assert (losses.first, losses.reference) == (2, 0.25)
    # without repeats 2 percent at the second step is no rounding
    losses = roundoff.check(ours, far).losses
    assert (losses.bound, losses.first) == ("derived", 1)
    assert "0.51 in far, 0.5 in a, a relative 0.02 apart where" in losses.text


def test_rounding_that_grows_is_none(tmp_path):
    ours = record(tmp_path / "a", [1.0, 1.0, 1.0])
    theirs = record(tmp_path / "b", [1 + 2.0**-23, 1 + 2.0**-21, 1 + 2.0**-20])
    assert not roundoff.check(ours, theirs).losses.differs


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (math.nan, math.nan, 0),
        (math.inf, 1, math.inf),
        (0, 1, 1),
        (0, 0, 0),
        (2, 1, 0.5),
    ],
)
def test_relative_distance(ours, theirs, expected):
    assert relative(ours, theirs) == expected


def test_a_run_of_an_earlier_version_is_not_called_the_same(tmp_path, capsys):
    paths = [record(tmp_path / name, [1.0]) for name in "ab"]
    (paths[1] / "rank0" / "set_up.json").unlink()
    (paths[1] / "rank0" / "steps.txt").unlink()
    check = roundoff.check(*paths)
    assert check.verdict == "undecided"
    assert "not recorded by the version" in check.missing[0].text
    assert {each.group for each in check.agreements} == {"processes", "mixed precision"}
    assert main(["check", *map(str, paths)]) == 4
    assert "The same in both" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": "x"}', "{" * 90])
def test_a_damaged_set_up_is_one_message(content, tmp_path):
    paths = [record(tmp_path / name, [1.0]) for name in "ab"]
    (paths[1] / "rank0" / "set_up.json").write_text(content)
    with pytest.raises(RoundoffError):
        roundoff.check(*paths)
    assert roundoff.load(paths[1]).verify()


def test_no_secret_is_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HUB_TOKEN", "abcdef")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcdef")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    path = record(tmp_path / "a", [1.0])
    text = (path / "rank0" / "set_up.json").read_text()
    assert "abcdef" not in text
    assert "CUBLAS_WORKSPACE_CONFIG" in text


def test_noting_changes_no_random_state(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    record(tmp_path / "a", [1.0, 2.0])
    assert torch.equal(torch.rand(4), expected)


def test_repeats_that_agree_and_that_do_not(tmp_path):
    with pytest.raises(RoundoffError, match="no other recording"):
        check_baseline(roundoff.load(record(tmp_path / "a", [1.0], keep="hash")), [])
    same = roundoff.load(record(tmp_path / "b", [1.0], keep="hash"))
    assert check_baseline(roundoff.load(tmp_path / "a"), [same]).agrees
    other = roundoff.load(record(tmp_path / "c", [1.5], keep="hash"))
    baseline = check_baseline(roundoff.load(tmp_path / "a"), [same, other])
    assert (baseline.agrees, baseline.kind, baseline.runs) == (False, "unseeded", 3)


def test_json_is_strict(tmp_path, capsys):
    paths = [record(tmp_path / name, [1.0, math.nan]) for name in "ab"]
    code = main(["check", *map(str, paths), "--json"])
    answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert code in (0, 4)
    assert answer["verdict"] in ("comparable", "undecided")


def test_of_several_ranks_that_parts_first_is_told(monkeypatch):
    from types import SimpleNamespace

    from roundoff.check import losses

    found = {
        rank: LossCurves(
            steps=3,
            differs=True,
            first=first,
            reference=1.0,
            candidate=2.0,
            difference=0.5,
            allowed=0.0,
            bound="derived",
            text="they part",
        )
        for rank, first in ((0, 2), (1, 1))
    }
    monkeypatch.setattr(
        losses, "compare_losses", lambda pair, _: found[pair.reference.rank]
    )
    pairs = [SimpleNamespace(reference=SimpleNamespace(rank=rank)) for rank in found]
    told = losses.losses_of_ranks(pairs, ())
    assert told.first == 1
    assert told.text == "on rank 1 they part"
