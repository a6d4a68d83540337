"""Recorded calls run again from a run on disk."""

import json
import math
from dataclasses import fields

import polars as pl
import pytest
import torch
from torch import nn

import roundoff
from roundoff.cli.app import main
from roundoff.errors import FormatError, PatternError, RunError
from roundoff.record.disk.loading import load
from roundoff.record.disk.schema import OPS
from roundoff.record.disk.writer import Writer
from roundoff.record.own_error import own_error
from roundoff.record.replay import ReplayedOutput
from roundoff.verbs.replay import replay


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 5),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(5, 3),
        nn.Softmax(-1),
    )
    return model, torch.randn(4, 6)


@pytest.fixture
def recorded_model(tmp_path):
    def make(keep="tensors", model=None, name="run"):
        model, x = model or model_and_batch()
        with (
            torch.no_grad(),
            roundoff.capture(tmp_path / name, model, keep=keep, overwrite=True),
        ):
            model(x)
        return load(tmp_path / name)

    return make


def test_a_kernel_that_makes_zero_is_held_against_its_gradient(tmp_path):
    """The rows of a softmax have the sum 1, whatever it reads: its gradient is zero but for rounding."""
    scores = torch.randn(8, 32, requires_grad=True)
    with roundoff.capture(tmp_path / "run", keep="tensors") as run:
        weights = scores.softmax(-1)
        (weights * 3.0).sum().backward()
        run.step()
    result = replay(tmp_path / "run")
    [row] = [r for r in result.rows if r.site == "/_softmax_backward_data"]
    assert row.sqnr_db < 60
    # each element is of 32 products, each off by a rounding of the gradient's size
    assert row.terms_db > -20 * math.log10(32 * 2.0**-24)


def test_a_gradient_that_is_zero_is_held_against_its_terms(tmp_path, capsys):
    torch.manual_seed(0)
    # what follows does not see a constant: the first bias has no gradient
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    with roundoff.capture(tmp_path / "run", model, keep="tensors") as run:
        model(torch.randn(64, 16)).square().sum().backward()
        run.step()
    result = replay(tmp_path / "run")
    [bias] = [row for row in result.rows if row.site == "0/sum"]
    assert bias.sqnr_db < 60
    grads = roundoff.load(tmp_path / "run").ops.collect()
    [total] = grads.filter(pl.col("record") == bias.record)["inputs"].to_list()
    terms = load(tmp_path / "run").tensor(record=total[0]).double().abs().sum(0)
    assert bias.terms_db == pytest.approx(
        20 * math.log10(float(terms.norm()) / bias.own_l2)
    )
    # 64 terms of fp32 are off by at most 63 u of their magnitudes' sum
    assert bias.terms_db > -20 * math.log10(63 * 2.0**-24)
    others = [row for row in result.rows if row is not bias]
    assert all(row.terms_db is None for row in others)
    assert main(["replay", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "1 result marked * cancelled to about zero" in said
    assert f"{bias.terms_db:.1f}*" in said


def test_own_errors_from_disk_are_those_of_the_operator_in_fp64(recorded_model):
    run = recorded_model()
    found = replay(run).table
    assert dict(found.schema) == {
        f.name: f.metadata["dtype"] for f in fields(ReplayedOutput)
    }
    assert (
        found["record"].to_list()
        == run.ops.filter(pl.col("call") >= 0).collect()["record"].to_list()
    )
    reasons = dict(found.drop_nulls("reason").select("overload", "reason").iter_rows())
    assert reasons == {
        "aten.t.default": "a view rounds nothing",
        "aten.bernoulli_.float": "draws random numbers",
        "aten.empty_like.default": "uninitialised memory",
    }
    first = found.filter(pl.col("overload") == "aten.addmm.default").row(0, named=True)
    model, x = model_and_batch()
    true = nn.functional.linear(
        x.double(), model[0].weight.double(), model[0].bias.double()
    )
    [error] = own_error(run.tensor(record=first["record"]), true)
    assert (first["own_l2"], first["own_max"]) == (error.l2, error.max)
    assert first["sqnr_db"] == pytest.approx(
        20 * math.log10(error.reference / error.l2)
    )
    relu = found.filter(pl.col("overload") == "aten.relu_.default").row(0, named=True)
    assert (relu["own_l2"], relu["sqnr_db"]) == (
        0.0,
        math.inf,
    )  # its input is stored from before it was overwritten
    ran = found.filter(pl.col("reason").is_null())
    assert (ran["sqnr_db"] > 120).all()  # fp32: 2**-24 is 144 dB, sums of 7


def test_the_recorded_format_gives_the_recorded_numbers(recorded_model):
    run = recorded_model()
    ran = replay(run, dtype="same").table.filter(pl.col("reason").is_null())
    assert ran.height >= 4
    assert (ran["own_l2"] == 0).all()
    assert replay(run, dtype="bf16", site="*/addmm").table["sqnr_db"].max() < 60


def test_views_that_share_memory_are_taken_again(recorded_model):
    class Views(nn.Module):
        def forward(self, x):
            a, b = x.t().split([2, 4])
            return a.exp() @ b.t()[:, :2]

    run = recorded_model(model=(Views(), torch.randn(4, 6)))
    found = replay(run).table
    assert set(found["reason"].drop_nulls()) == {"a view rounds nothing"}
    ran = found.filter(pl.col("reason").is_null())
    assert ran["overload"].to_list() == ["aten.exp.default", "aten.mm.default"]
    assert (ran["own_max"] < 1e-5).all()


def test_selection(recorded_model):
    run = recorded_model()
    one = replay(run, site="*/addmm", phase="forward", rank=0, step=0).table
    assert set(one["site"]) == {
        s for s in replay(run).table["site"] if s.endswith("/addmm")
    }
    with pytest.raises(PatternError, match="such as.*softmax"):
        replay(run, site="4/_softmaxx")
    wrongs = [
        ({"phase": "backward"}, "no phase 'backward'"),
        ({"rank": 3}, "no rank 3"),
        ({"step": 7}, "no step 7"),
        ({"dtype": "int8"}, "does not compute"),
        ({"device": "cuda:99"}, "device"),
        ({"device": "what"}, "device"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(RunError, match=message):
            replay(run, **wrong)
    with pytest.raises(FormatError, match="unknown format"):
        replay(run, dtype="fp65")


def test_what_is_not_stored_is_a_reason(recorded_model, tmp_path):
    run = recorded_model()
    rows = run.ops.collect().to_dicts()
    bias = next(row for row in rows if row["name"] == "0.bias")
    bias |= {"blob": None, "reason": "too large"}
    rows[-1]["blob"] = None
    for row in rows:
        if row["operator"] == "relu_":
            row["arguments"] = None
        if row["operator"] == "div_":
            row["overload"] = "mylib.div_.default"
    with Writer(tmp_path / "less", about={"keep": "tensors"}) as writer:
        for row in rows:
            if row["blob"] == str(row["record"]):
                writer.add(0, row["blob"], run.tensor(record=row["record"]).reshape(-1))
        writer.write_step(0, {name: [row[name] for row in rows] for name in OPS})
    found = replay(load(tmp_path / "less")).table
    reasons = dict(found.select("overload", "reason").iter_rows())
    assert reasons["aten.relu_.default"] == "its arguments could not be written"
    assert reasons["aten._softmax.default"].startswith("its result 4/_softmax")
    texts = " ".join(found["reason"].drop_nulls())
    assert "0.bias is not stored (too large)" in texts
    assert (
        "import the library that registers 'mylib' first"
        in reasons["mylib.div_.default"]
    )


def test_a_run_without_tensors_says_how_to_capture_them(recorded_model):
    run = recorded_model(keep="stats")
    with pytest.raises(RunError, match="capture with --keep tensors"):
        replay(run)


def test_bad_input_is_exit_code_2_and_one_message(recorded_model, capsys, tmp_path):
    run = recorded_model()
    for arguments in (
        ["nowhere"],
        [str(run.path), "--site", "nothing"],
        [str(run.path), "--dtype", "fp65"],
        [str(run.path), "--step", "9"],
        [str(run.path), "--device", "what"],
    ):
        assert main(["replay", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("roundoff: ")
        assert "Traceback" not in captured.err


def test_the_verb_prints_a_table_or_json(recorded_model, capsys):
    run = recorded_model()
    assert main(["replay", str(run.path)]) == 0
    text = capsys.readouterr().out
    assert "Own error against fp64 on cpu" in text
    assert "0/addmm" in text
    assert "draws random numbers" in text
    assert main(["replay", str(run.path), "--json", "--site", "*/addmm"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["overload"] for row in data["rows"]} == {"aten.addmm.default"}
    assert data["rows"][0]["sqnr_db"] > 100


def test_what_reads_a_sparse_tensor_does_not_run_again(tmp_path):
    """Its values alone are stored: kernels would read beyond their end."""
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    with roundoff.capture(tmp_path / "run", keep="tensors") as run:
        torch.mm((x * 2).to_sparse(), x.t()).sum()
        run.step()
    stored = roundoff.load(tmp_path / "run")
    assert stored.tensor("/_to_sparse").tolist() == (x * 2)[x != 0].tolist()
    found = dict(replay(stored).table.select("site", "reason").iter_rows())
    assert found["/mul"] is None
    assert (
        found["/mm"] == "its input /_to_sparse is stored as the values inside it alone"
    )
    assert (
        found["/_to_sparse"]
        == "not run again: aten._to_sparse is none of the operators that a "
        "recording may name"
    )
