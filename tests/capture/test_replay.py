"""Recorded calls run again from a run on disk."""

import json
import math

import polars as pl
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundoff.capture.arguments import describe
from roundoff.capture.own import own_error
from roundoff.capture.replay import COLUMNS, replay
from roundoff.cli.app import main
from roundoff.errors import FormatError, PatternError, RunError
from roundoff.store import OPS, Writer, load


class Rows(TorchDispatchMode):
    """Records every call, in-place ones as a new record; a view shares what is stored of its input."""

    def __init__(self, writer, keep=True):
        super().__init__()
        self.writer, self.keep, self.rows, self.records, self.alive, self.calls = writer, keep, [], {}, [], 0
        self.results = {}

    def row(self, tensor, **fields):
        record = len(self.rows)
        self.records[id(tensor)] = record
        self.alive.append(tensor)
        base = fields.get("view_of")
        if base is not None:
            blob = self.rows[base]["blob"]
        else:
            blob = self.writer.add(0, str(record), tensor.detach().clone()) if self.keep else None
        whole = dict.fromkeys(OPS) | {"rank": 0, "step": 0, "record": record, "module": "", "index": 0, "place": 0}
        self.rows.append(whole | fields | {"blob": blob})
        return record

    def known(self, tensor):
        if id(tensor) in self.records:
            return self.records[id(tensor)]
        return self.row(tensor, call=-1, operator="input")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = describe(args, kwargs, self.known)
        view = isinstance(args[0], torch.Tensor) and func.is_view
        result = func(*args, **kwargs)
        for place, tensor in enumerate(t for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
            record = self.row(
                tensor, call=self.calls, phase="forward", operator=func.overloadpacket.__name__, index=self.calls,
                overload=str(func), arguments=arguments, place=place, view_of=self.known(args[0]) if view else None,
            )  # fmt: skip
            self.results[record] = tensor.detach().clone()
        self.calls += 1
        return result

    def write(self):
        self.writer.write_step(0, {name: [row[name] for row in self.rows] for name in OPS})


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(5, 3), nn.Softmax(-1))
    return model, torch.randn(4, 6)


@pytest.fixture
def recorded(tmp_path):
    def make(keep=True, model=None, name="run"):
        model, x = model or model_and_batch()
        with Writer(tmp_path / name, about={}) as writer:
            mode = Rows(writer, keep)
            with mode, torch.no_grad():
                model(x)
            mode.write()
        return load(tmp_path / name), mode

    return make


def test_own_errors_from_disk_are_those_of_the_operator_in_fp64(recorded):
    run, mode = recorded()
    found = replay(run)
    assert dict(found.schema) == COLUMNS
    assert found["record"].to_list() == [r["record"] for r in mode.rows if r["call"] >= 0]
    reasons = dict(found.drop_nulls("reason").select("overload", "reason").iter_rows())
    assert reasons == {
        "aten.t.default": "a view rounds nothing",
        "aten.bernoulli_.float": "draws random numbers",
        "aten.empty_like.default": "uninitialised memory",
    }
    first = found.filter(pl.col("overload") == "aten.addmm.default").row(0, named=True)
    model, x = model_and_batch()
    true = nn.functional.linear(x.double(), model[0].weight.double(), model[0].bias.double())
    [error] = own_error(mode.results[first["record"]], true)
    assert (first["own_l2"], first["own_max"]) == (error.l2, error.max)
    assert first["sqnr_db"] == pytest.approx(20 * math.log10(error.reference / error.l2))
    relu = found.filter(pl.col("overload") == "aten.relu_.default").row(0, named=True)
    assert (relu["own_l2"], relu["sqnr_db"]) == (0.0, math.inf)  # its input is stored from before it was overwritten
    ran = found.filter(pl.col("reason").is_null())
    assert (ran["sqnr_db"] > 120).all()  # fp32: 2**-24 is 144 dB, sums of 7


def test_the_recorded_format_gives_the_recorded_numbers(recorded):
    run, _ = recorded()
    ran = replay(run, dtype="same").filter(pl.col("reason").is_null())
    assert ran.height >= 4
    assert (ran["own_l2"] == 0).all()
    assert replay(run, dtype="bf16", site="/addmm*")["sqnr_db"].max() < 60


def test_views_that_share_memory_are_taken_again(recorded):
    class Views(nn.Module):
        def forward(self, x):
            a, b = x.t().split([2, 4])
            return a.exp() @ b.t()[:, :2]

    run, _ = recorded(model=(Views(), torch.randn(4, 6)))
    found = replay(run)
    assert set(found["reason"].drop_nulls()) == {"a view rounds nothing"}
    ran = found.filter(pl.col("reason").is_null())
    assert ran["overload"].to_list() == ["aten.exp.default", "aten.mm.default"]
    assert (ran["own_max"] < 1e-5).all()


def test_selection(recorded):
    run, _ = recorded()
    one = replay(run, site="/addmm#*", phase="forward", rank=0, step=0)
    assert set(one["site"]) == {s for s in replay(run)["site"] if s.startswith("/addmm")}
    with pytest.raises(PatternError, match="such as.*softmax"):
        replay(run, site="/softmaxx")
    wrongs = [
        ({"phase": "backward"}, "no phase 'backward'"), ({"rank": 3}, "no rank 3"), ({"step": 7}, "no step 7"),
        ({"dtype": "int8"}, "does not compute"), ({"device": "cuda:99"}, "device"), ({"device": "what"}, "device"),
    ]  # fmt: skip
    for wrong, message in wrongs:
        with pytest.raises(RunError, match=message):
            replay(run, **wrong)
    with pytest.raises(FormatError, match="unknown format"):
        replay(run, dtype="fp65")


def test_what_is_not_stored_is_a_reason(recorded, tmp_path):
    _, mode = recorded()
    mode.rows[1] |= {"blob": None, "reason": "too large", "name": "0.bias"}
    last = mode.rows[-1]
    last["blob"] = None
    for row in mode.rows:
        if row["operator"] == "relu_":
            row["arguments"] = None
        if row["operator"] == "div_":
            row["overload"] = "mylib.div_.default"
    with Writer(tmp_path / "less", about={}) as writer:
        for record, tensor in enumerate(mode.alive):
            if mode.rows[record]["blob"] is not None and mode.rows[record]["view_of"] is None:
                mode.rows[record]["blob"] = writer.add(0, str(record), tensor)
        mode.writer = writer
        mode.write()
    found = replay(load(tmp_path / "less"))
    reasons = dict(found.select("overload", "reason").iter_rows())
    assert reasons["aten.relu_.default"] == "its arguments could not be written"
    assert reasons["aten._softmax.default"].startswith("its result /_softmax")
    texts = " ".join(found["reason"].drop_nulls())
    assert "is not stored (too large)" in texts
    assert "import the library that registers 'mylib' first" in reasons["mylib.div_.default"]


def test_a_run_without_tensors_says_how_to_capture_them(recorded):
    run, _ = recorded(keep=False)
    with pytest.raises(RunError, match="capture with --keep tensors"):
        replay(run)


def test_bad_input_is_exit_code_2_and_one_message(recorded, capsys, tmp_path):
    run, _ = recorded()
    for arguments in (["nowhere"], [str(run.path), "--site", "nothing"], [str(run.path), "--dtype", "fp65"],
                      [str(run.path), "--step", "9"], [str(run.path), "--device", "what"]):  # fmt: skip
        assert main(["replay", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("roundoff: ")
        assert "Traceback" not in captured.err


def test_the_verb_prints_a_table_or_json(recorded, capsys):
    run, _ = recorded()
    assert main(["replay", str(run.path)]) == 0
    text = capsys.readouterr().out
    assert "Own error against fp64 on cpu" in text
    assert "/addmm" in text
    assert "draws random numbers" in text
    assert main(["replay", str(run.path), "--json", "--site", "/addmm*"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["overload"] for row in data["rows"]} == {"aten.addmm.default"}
    assert data["rows"][0]["sqnr_db"] > 100
