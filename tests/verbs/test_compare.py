"""``compare`` on small trainings: what it says, keeps, judges again and adds up to."""

from __future__ import annotations

import json
import math
import sys

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from torch import nn

import roundoff
from roundoff.cli.app import main
from roundoff.compare.repeats import LABEL
from roundoff.errors import RunError
from roundoff.record import capture_script
from roundoff.report import plain
from roundoff.verbs.compare import VERSION, is_saved


class Net(nn.Module):
    def __init__(self, eps=1e-5, gain=1.0, dtype=None):
        super().__init__()
        torch.manual_seed(0)
        self.low, self.norm, self.high = (
            nn.Linear(8, 16),
            nn.LayerNorm(16, eps=eps),
            nn.Linear(16, 4),
        )
        self.gain, self.dtype = gain, dtype

    def forward(self, x):
        with torch.autocast(
            "cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None
        ):
            return self.high(torch.relu(self.norm(self.low(x)))) * self.gain


def train(model):
    model(
        torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    ).float().square().mean().backward()


@pytest.fixture
def compared(recorded):
    """``compared(one, other)`` records both and compares them; models, or their options."""

    def compare(one, other, *, work=train, keep="tensors", **options):
        runs = [
            recorded(work, Net(**side) if isinstance(side, dict) else side, keep=keep)
            for side in (one, other)
        ]
        return roundoff.compare(reference=runs[0], candidate=runs[1], **options)

    return compare


def test_agreement(compared):
    found = compared({}, {})
    assert found.agrees
    assert found.verdicts == {"pass": found.table.height}
    assert found.table["equal"].all()
    assert found.table["error"].max() == 0
    assert (found.divergence, found.culprits(), found.rounding()) == (None, [], [])
    assert found.answer.count("bit for bit") == 1


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_the_operator_at_fault(compared, keep):
    found = compared({}, {"eps": 0.3}, keep=keep)
    assert not found.agrees
    (culprit, *others) = found.culprits()
    assert found.culprits(1) == [culprit]
    assert found.culprits(0) == []
    said = "site reference_site phase line rank step error own contribution looks_like evidence try"
    assert {*said.split()} <= {*plain(culprit)}
    assert (culprit.site, culprit.reference_site) == ("norm/native_layer_norm",) * 2
    assert (culprit.module, culprit.operator, culprit.phase) == (
        "norm",
        "native_layer_norm",
        "forward",
    )
    assert culprit.inputs_error == 0
    assert "test_compare.py:" in culprit.line
    if keep == "tensors":
        assert culprit.looks_like == "wrong constant"
        assert "1e-05" in culprit.evidence
        assert "0.3" in culprit.evidence
    assert not any(c.phase == "forward" for c in others)
    # before it everything is equal, and the loss inherits
    table = found.table.filter(phase="forward").sort("record")
    at = table["site"].to_list().index("norm/native_layer_norm")
    assert table[:at]["error"].max() == 0
    last = table.filter(operator="mean").row(0, named=True)
    assert (last["cause"], last["origin"], last["verdict"]) == (
        "inherited",
        "norm/native_layer_norm",
        "fail",
    )


class Branches(nn.Module):
    """Two branches that do not read each other; what each is scaled by is an argument of its operator."""

    def __init__(self, first, later):
        super().__init__()
        self.first, self.later = first, later

    def forward(self, x):
        x = x.exp()
        return (
            torch.nn.functional.elu(-x, self.first).sum()
            + torch.nn.functional.hardtanh(x, 0.0, self.later).sum()
        )


def test_culprits_by_what_comes_of_them_the_divergence_by_order(compared):
    work = lambda model: model(torch.linspace(0, 1, 16))  # noqa: E731
    found = compared(Branches(1.0, 2.0), Branches(1.001, 1.1), work=work)
    operators = [c.operator for c in found.culprits()]
    assert operators == ["hardtanh", "elu"]
    assert [c.inputs_error for c in found.culprits()] == [0, 0]
    shares = [c.contribution for c in found.culprits()]
    assert shares[0] > 0.9 > 0.1 > shares[1] > 0
    assert found.divergence.operator == "elu"
    assert found.culprits(1) == found.culprits()[:1]


def test_coverage_adds_up(compared):
    class More(Net):
        def forward(self, x):
            return super().forward(x.double().float()) + torch.zeros(()).exp().log()

    found = compared({}, More())
    coverage = found.coverage
    assert sum(coverage.status.values()) == coverage.rows == found.table.height
    assert coverage.status == dict(found.table["status"].value_counts().iter_rows())
    assert coverage.measured + sum(r.count for r in coverage.reasons) == coverage.rows
    assert coverage.measured == found.table["error"].is_not_null().sum()
    assert coverage.equal == found.table["equal"].sum()
    assert "only in candidate" in coverage.status
    assert all(r.reason and r.reason != "unknown" for r in coverage.reasons)
    assert sum(found.verdicts.values()) == coverage.rows


def test_rounding_is_named_where_nothing_is_wrong(compared):
    found = compared({}, {"dtype": torch.bfloat16})
    assert found.agrees
    named = found.rounding(3)
    assert len(named) == 3
    shares = [row.contribution for row in named]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] <= shares[0] <= 1
    assert sum(row.contribution for row in found.rounding(1000)) <= 1 + 1e-9
    # bf16 autocast runs the products in bf16; each rounds by 2**-9 on average, relative
    assert {"low/addmm", "high/addmm"} & {row.site for row in named}
    assert found.culprits() == []


def test_shares_of_the_error_add_up(compared):
    table = compared({}, {"eps": 0.3, "gain": 1.5}).table
    # 1 where anything differs at the end; shares are of fp64 sums
    assert table["contribution"].sum() == pytest.approx(1.0, rel=1e-9)


def test_judging_again(compared):
    found = compared({}, {"eps": 0.3})
    assert found.judge(margin=1e30).agrees
    assert found.judge(cosine=-1.0).agrees
    strict = found.judge(max_abs=0.0)
    apart = found.table.filter(pl.col("max_abs") > 0).height
    assert strict.verdicts["fail"] == apart > 0
    assert strict.about.limits == {"max_abs": 0.0}
    assert_frame_equal(strict.table.drop("verdict"), found.table.drop("verdict"))
    assert_frame_equal(strict.judge().table, found.table)  # the derived verdicts again
    assert found.about.limits == {}  # the first is as it was
    with pytest.raises(RunError, match="cosin: there is no such metric"):
        found.judge(cosin=0.9)


@pytest.mark.parametrize("url", [False, True])
def test_saved_and_loaded(compared, tmp_path, url):
    found = compared({}, {"eps": 0.3})
    place = "memory://saved/comparison" if url else tmp_path / "saved"
    assert not is_saved(place)
    found.save(place)
    assert is_saved(place)
    again = roundoff.Comparison.load(place)
    assert_frame_equal(again.table, found.table)
    assert again.about == found.about
    assert (again.answer, again.culprits(), again.divergence) == (
        found.answer,
        found.culprits(),
        found.divergence,
    )
    assert again.coverage == found.coverage
    assert again.judge(margin=1e30).agrees
    assert again.to_dict(5) == found.to_dict(5)


def test_what_is_no_saved_comparison(compared, tmp_path):
    with pytest.raises(RunError, match="no comparison is saved here") as caught:
        roundoff.Comparison.load(tmp_path)
    assert "comparison.json and comparison.parquet" in str(caught.value)
    compared({}, {}).save(tmp_path / "kept")
    about = tmp_path / "kept" / "comparison.json"
    text = about.read_text()
    about.write_text(text.replace(f'"comparison": {VERSION}', '"comparison": 99'))
    with pytest.raises(RunError, match="another version"):
        roundoff.Comparison.load(tmp_path / "kept")
    for broken in ("[]", '{"comparison": '):
        about.write_text(broken)
        with pytest.raises(RunError, match="another version|cannot be read"):
            roundoff.Comparison.load(tmp_path / "kept")
    about.write_text(text)
    table = tmp_path / "kept" / "comparison.parquet"
    table.write_bytes(table.read_bytes()[:100])
    with pytest.raises(RunError, match="the saved comparison cannot be read"):
        roundoff.Comparison.load(tmp_path / "kept")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reference": None}, "does not say its reference"),
        ({"reference": None, "candidate": None}, "its reference and candidate"),
        ({"margin": "2"}, '"margin" of the saved comparison cannot be read'),
        ({"limits": {"cosine": "0.9"}}, '"limits" of the saved'),
        ({"environment": []}, '"environment" of the saved'),
        ({"notes": "none"}, '"notes" of the saved'),
        ({"unstable": [{"side": "reference"}]}, '"unstable" of the saved'),
    ],
)
def test_keys_of_a_saved_comparison_are_checked(compared, tmp_path, changes, words):
    compared({}, {}).save(tmp_path)
    file = tmp_path / "comparison.json"
    about = json.loads(file.read_text()) | changes
    kept = {name: value for name, value in about.items() if value is not None}
    file.write_text(json.dumps(kept))
    with pytest.raises(RunError, match=words):
        roundoff.Comparison.load(tmp_path)


def test_statistics_of_one_side_alone(recorded):
    kept, bare = (
        recorded(train, Net(eps=eps), keep=keep, leaves=0)
        for eps, keep in ((1e-5, "tensors"), (0.3, "stats"))
    )
    found = roundoff.compare(reference=kept, candidate=bare)
    assert found.table["max_abs"].is_null().all()
    assert found.culprits(1)[0].site == "norm/native_layer_norm"
    assert found.about.kept == {"reference": "tensors", "candidate": "stats"}


def test_without_tensors_says_the_same_from_less(compared):
    """Asked not to look at tensors that are there: as if they were not."""
    found = compared({}, {"eps": 0.3}, tensors=False)
    without = compared({}, {"eps": 0.3}, keep="stats")
    assert_frame_equal(found.table, without.table)
    assert found.culprits(1)[0].site == "norm/native_layer_norm"


# Repeats beside a run: noise floors and what does not repeat itself.


SPREAD: list[float] = []


def noisy(model):
    """A loss whose last factor is drawn anew in every run, around 1 as far as ``SPREAD`` says for it."""
    y, far = model(torch.ones(3, 8)), SPREAD.pop(0) if SPREAD else 0.5
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    (y * torch.empty(4).uniform_(1 - far, 1 + far, generator=generator)).sum()


def beside(recorded, name, work, **options):
    """A run with, beside it, repeats that say of which run they are one."""
    run = recorded(work, Net(), path=name)
    for kind, seeds in options.items():
        for number, seed in enumerate(seeds, 1):
            again = roundoff.capture(
                run.path.with_name(f"{name}.{kind}{number}"),
                Net(),
                keep="tensors",
                noise=seed,
            )
            again.of = run.about.id
            with again as repeat:
                work(again.model)
                repeat.step()
    return run


def cancelling(model):
    """The last digits of fp32 are most of the difference: its noise is 2**-24 / 1e-4 of it, far above one rounding."""
    y = torch.linspace(0.1, 1, 64).exp()
    (y * (1 + 1e-4) * model.gain - y).square().sum()


def test_a_noise_floor_raises_tolerances(recorded):
    plain, candidate = (
        recorded(cancelling, Net()),
        recorded(cancelling, Net(gain=1 + 1e-6)),
    )
    without = roundoff.compare(reference=plain, candidate=candidate).table
    run = beside(recorded, "ours", cancelling, noise=(1, 2))
    found = roundoff.compare(reference=run, candidate=candidate)
    assert any("2 more runs of the reference" in note for note in found.about.repeats)
    known = without["tolerance"].is_not_null()
    raised = (found.table["tolerance"] > without["tolerance"]).filter(known)
    assert {*found.table.filter(known).filter(raised)["operator"]} >= {"sub", "pow"}
    assert not (found.table["tolerance"] < without["tolerance"]).any()
    (sub,) = found.table.filter(operator="sub")["tolerance"]
    # three times the floor: two runs, each value moved by at most an ulp at a few places
    assert 3 * 2.0**-26 / 1e-4 < sub < 3 * 2.0**-21 / 1e-4


def test_what_is_not_reproducible_is_not_called_wrong(recorded):
    SPREAD[:] = [
        1e-4,
        1e-4,
        0.9,
    ]  # the candidate draws further off than the repeats: beyond three times the floor
    run = beside(recorded, "ours", noisy, repeat=(None,))
    found = roundoff.compare(reference=run, candidate=recorded(noisy, Net()))
    assert [row.operator for row in found.about.unstable] == ["uniform_"]
    assert found.about.unstable[0].side == "reference"
    named = found.culprits(1)[0]
    assert (named.operator, named.looks_like) == ("uniform_", LABEL)
    assert "draws random numbers" in named.evidence
    assert "seed it" in named.advice
    assert any(
        note.startswith("The reference does not repeat itself: /uniform_")
        for note in found.about.repeats
    )


def test_two_runs_of_one_command(recorded):
    command = ["train.py", "--lr", "0.1"]
    runs = [recorded(noisy, Net(), command=command) for _ in range(2)]
    found = roundoff.compare(reference=runs[0], candidate=runs[1])
    assert any(
        note.startswith("Both runs are of one command in one environment")
        for note in found.about.repeats
    )
    assert found.culprits(1)[0].looks_like == LABEL
    assert not found.about.programs
    equal = [recorded(train, Net(), command=command) for _ in range(2)]
    assert roundoff.compare(reference=equal[0], candidate=equal[1]).about.repeats == []


def test_a_page(compared, tmp_path):
    found = compared({}, {"eps": 0.3})
    found.report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "norm/native_layer_norm" in page
    assert not math.isnan(found.table["error"].max())


def _recorded(path, run, keep="stats", leaves=32):
    with roundoff.capture(path, keep=keep, leaves=leaves):
        run()
    return path


@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_an_axis_is_compared_whatever_was_kept(tmp_path, keep):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    ours = _recorded(tmp_path / "a", lambda: (x + 0).softmax(-1).sum(), keep)
    theirs = _recorded(tmp_path / "b", lambda: (x + 0).softmax(0).sum(), keep)
    comparison = roundoff.compare(reference=ours, candidate=theirs)
    [first, *_] = comparison.culprits()
    assert first.operator == "_softmax"
    assert "dim" in first.evidence


def _network(path, *, bias, bf16):
    torch.manual_seed(0)
    x = torch.randn(32, 16)
    first = nn.Linear(16, 16)
    second = nn.Linear(16, 16, bias=bias)  # draws its bias last
    net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh())
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return _recorded(path, lambda: net(x).square().mean(), leaves=0)


def test_what_statistics_cannot_decide_is_said_and_does_not_agree(tmp_path):
    """A bias of a tenth of the result is missing: its rounding or a fault, nobody can say."""
    ours = _network(tmp_path / "a", bias=True, bf16=False)
    right = _network(tmp_path / "b", bias=True, bf16=True)
    wrong = _network(tmp_path / "c", bias=False, bf16=True)
    assert roundoff.compare(reference=ours, candidate=right).agrees
    comparison = roundoff.compare(reference=ours, candidate=wrong)
    assert not comparison.agrees
    assert not comparison.fails
    assert comparison.open == comparison.summary().open > 0
    assert "cannot be decided from statistics" in comparison.answer
    assert "--keep tensors" in comparison.answer
    assert main(["compare", str(ours), str(wrong)]) == 4


@pytest.mark.parametrize(
    "place", ["nosuch://bucket/run", "absent/folder", "\0", "memory://nothing/here"]
)
def test_nothing_is_saved_where_nothing_can_be_read(place):
    assert not is_saved(place)


SCRIPT = """
import sys
import torch
from scaled import FACTOR
torch.manual_seed(0)
layer = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=float(sys.argv[2]))
for _ in range(2):
    optimizer.zero_grad()
    (layer(torch.ones(3, 4)) * FACTOR).square().sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """``script(name, factor, rate)`` records train.py, which imports ``scaled.py`` from its folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)

    def record(name, factor, rate="0.1"):
        (folder / "scaled.py").write_text(f"FACTOR = {factor}\n")
        monkeypatch.delitem(sys.modules, "scaled", raising=False)
        command = [str(folder / "train.py"), "--rate", rate]
        capture_script(command, tmp_path / name, keep="tensors")
        monkeypatch.delitem(sys.modules, "scaled", raising=False)
        return tmp_path / name

    return record


def test_a_script_that_was_edited_in_between(script, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = roundoff.compare(
        reference=script("one", 1.0), candidate=script("other", 1.5)
    )
    [note] = found.about.programs
    assert note == "The script was edited between the runs: scaled.py differs"
    assert note in found.answer
    assert found.culprits(1)[0].looks_like != LABEL


def test_the_same_script_with_another_option(script, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    runs = script("one", 1.0), script("other", 1.0, "0.2")
    found = roundoff.compare(reference=runs[0], candidate=runs[1])
    [note] = found.about.programs
    assert note == (
        "The command lines differ: --rate 0.2 where the reference has --rate 0.1"
    )
    again = roundoff.compare(reference=runs[0], candidate=script("third", 1.0))
    assert again.agrees
    assert not again.about.programs
