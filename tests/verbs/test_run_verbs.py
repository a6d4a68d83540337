"""``roundoff.show``, ``roundoff.overflow`` and ``roundoff.replay``: the functions of the
verbs, on a run, its folder and its path."""

from __future__ import annotations

import json
import math

import pytest
import torch

import roundoff
from roundoff.cli.app import main
from roundoff.errors import PatternError, RunError


@pytest.fixture
def folder(tmp_path):
    """A run in which exp overflows in fp16 and clamp removes the Inf."""
    path = tmp_path / "run"
    with roundoff.capture(path, keep="tensors") as run:
        x = torch.tensor([1.0, 2.0, 12.0], dtype=torch.float16)
        x.exp().clamp(max=60000.0)
        run.step(loss_scale=4.0)
    return path


@pytest.mark.parametrize("form", [str, lambda path: path, roundoff.load])
def test_a_run_its_folder_and_its_path_are_the_same(folder, form):
    run = form(folder)
    assert roundoff.show(run) == roundoff.show(roundoff.load(folder))
    assert roundoff.overflow(run) == roundoff.overflow(roundoff.load(folder))
    assert roundoff.replay(run) == roundoff.replay(roundoff.load(folder))


def test_show_has_a_row_for_each_site_or_one_in_full(folder):
    table = roundoff.show(folder, sort="inf")
    assert (table.rank, table.step, table.sort) == (0, 0, "inf")
    assert table.coverage.tensors - table.coverage.views == len(table.rows)
    first = table.rows[0]
    assert (first.site, first.posinf, first.max) == (
        "/exp",
        1,
        pytest.approx(7.39, 1e-3),
    )
    details = roundoff.show(folder, "/exp")
    (entry,) = details.site
    assert (entry.site, entry.dtype, entry.shape) == ("/exp", "float16", [3])
    assert [user.site for user in entry.used_by] == ["/clamp"]
    assert sum(bar.count for bar in entry.histogram) == 2
    with pytest.raises(PatternError, match="no such site"):
        roundoff.show(folder, "/expp")


def test_overflow_says_where_and_why(folder):
    answer = roundoff.overflow(folder)
    assert (answer.first.kind, answer.first.site) == ("birth", "/exp")
    assert "passes the largest float16" in answer.first.cause
    assert [event.kind for event in answer.events] == ["birth", "death"]
    assert answer.event_table["site"].to_list() == ["/exp", "/clamp"]
    assert {share.format for share in answer.formats} == {
        "fp16",
        "bf16",
        "fp8_e4m3fn",
        "fp8_e5m2",
    }
    assert roundoff.overflow(folder, allow=["*/exp"]).first is None
    with pytest.raises(RunError, match="no step 7"):
        roundoff.overflow(folder, step=7)


def test_replay_has_a_row_for_each_output(folder):
    replay = roundoff.replay(folder, site="*/exp")
    (row,) = replay.rows
    assert (replay.device, replay.dtype, row.site) == ("cpu", "fp64", "/exp")
    # Inf is recorded where fp64 has exp(12)
    assert (row.own_max, row.sqnr_db, row.reason) == (math.inf, -math.inf, None)
    assert replay.table.height == 1
    (same,) = roundoff.replay(folder, site="*/exp", dtype="same").rows
    assert same.own_max == 0.0


@pytest.mark.parametrize("verb", ["show", "overflow", "replay"])
def test_the_command_prints_the_fields_of_the_function(folder, capsys, verb):
    main([verb, str(folder), "--json"])
    printed = json.loads(capsys.readouterr().out)
    result = getattr(roundoff, verb)(folder)
    names = list(type(result).__dataclass_fields__)
    assert [key for key in printed if key != "not_finite"] == ["run", *names]
