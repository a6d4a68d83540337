"""Each named output has its own noise, prediction and target: none is hidden behind a larger one."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass

import polars as pl
import pytest
import torch
from torch import nn

from roundoff import Budget, Workload, budget, verify
from roundoff.budget import Goal, Problem, parse_target
from roundoff.errors import InfeasibleError, PlanError, WorkloadError
from roundoff.plan.output_noise import output_noises
from roundoff.plan.rounded_model import run_batches


class Changed(nn.Module):
    """A model whose outputs a function changes."""

    def __init__(self, model, change):
        super().__init__()
        self.model = model
        self.change = change

    def forward(self, x):
        return self.change(self.model(x))


def measured_db(workload, formats):
    """SQNR of each output tensor by hand, in fp64."""
    reference = run_batches(workload).targets
    rounded = run_batches(workload, formats).targets
    decibels = {}
    for name in reference[0]:
        pairs = [
            (a[name].double(), b[name].double())
            for a, b in zip(rounded, reference, strict=True)
        ]
        error = sum(float((a - b).square().sum()) for a, b in pairs)
        signal = sum(float(b.square().sum()) for _, b in pairs)
        decibels[name] = -10 * math.log10(error / signal) if error else math.inf
    return decibels


def all_in(measured, fmt):
    return {s.site: fmt for s in measured.sites if fmt not in s.refused}


@pytest.fixture(scope="module")
def workload(TwoHeads):
    torch.manual_seed(0)
    return Workload(TwoHeads(), [torch.randn(48, 16), torch.randn(16, 16)])


@pytest.fixture(scope="module")
def measured(workload):
    return budget(workload, ["int8", "int4"], probes=16)


def test_the_larger_output_hides_nothing(workload, measured):
    formats = all_in(measured, "int4")
    actual = measured_db(workload, formats)
    assert actual["cls"] < 20
    assert actual["price"] > 80  # together they had been at 80 dB
    predicted = {o.output: o.db for o in measured.predict(formats).outputs}
    assert predicted == {
        # 64 samples and 16 probes: 0.2 dB of sampling, the rest is second order
        "cls": pytest.approx(actual["cls"], abs=1.5),
        "price": pytest.approx(actual["price"], abs=1.5),
    }
    assert measured.predict(formats).worst.output == "cls"


def test_the_table_says_which_output_a_site_costs(measured):
    rows = {(c.site, c.format): c for c in measured.costs}
    assert rows["price/linear", "int8"].output == "price"
    assert rows["body/linear", "int8"].output == "cls"


@pytest.mark.parametrize(
    "target", ["40dB", "cls=20dB,price=110dB", {"price": 120}, "35,price=130"]
)
def test_a_plan_meets_the_target_of_every_output(workload, measured, target):
    plan = measured.plan(target)
    wanted = parse_target(target)
    found = verify(workload, plan, budget=measured)
    assert found.met
    assert [row.output for row in found.outputs] == ["cls", "price"]
    actual = measured_db(workload, found.plan.formats(s.site for s in measured.sites))
    for row in found.outputs:
        assert row.sqnr_db == pytest.approx(actual[row.output])
        assert row.target_db == wanted.of_output(row.output)
        assert row.target_db is None or row.sqnr_db >= row.target_db


def test_a_target_for_one_output_leaves_the_other_free(measured):
    cheapest = measured.plan({"price": 60}, formats=["int4"])
    assert cheapest.format_of("cls/linear") == "int4"
    strict = measured.plan(30, formats=["int4"])
    assert strict.format_of("cls/linear") == "fp32"


def test_the_optimum_of_all_combinations(measured):
    """Every choice of formats by hand, against the integer program with two bounds."""
    problem = Problem(measured, Goal(cost="bitops"))
    target = parse_target("cls=30dB,price=110dB")
    sites = [decision.name for decision in problem.decisions]
    options = [[c.format for c in d.choices] for d in problem.decisions]
    best = math.inf
    for combination in itertools.product(*options):
        chosen = {s: f for s, f in zip(sites, combination, strict=True) if f != "fp32"}
        predicted = {o.output: o.db for o in measured.predict(chosen).outputs}
        if predicted["cls"] >= 30 and predicted["price"] >= 110:
            best = min(best, problem.cost_of(chosen))
    found = problem.cheapest(target)
    assert all(
        o.db >= target.of_output(o.output) for o in measured.predict(found).outputs
    )
    assert problem.cost_of(found) == pytest.approx(best)


def test_what_is_out_of_reach_names_the_output(measured):
    with pytest.raises(InfeasibleError) as error:
        measured.plan("cls=90dB,price=20dB", pin={"cls/linear": "int8"})
    assert "output cls" in str(error.value)
    assert error.value.short_db > 0
    # errors that add up keep the last of it out of reach
    lower = 90 - error.value.short_db - 1
    plan = measured.plan({"cls": lower, "price": 20}, pin={"cls/linear": "int8"})
    assert plan.format_of("cls/linear") == "int8"


def test_an_unknown_output_is_named_with_the_nearest(workload, measured):
    with pytest.raises(PlanError, match="did you mean price"):
        measured.plan("prise=40dB")
    with pytest.raises(PlanError, match="did you mean price"):
        verify(workload, measured.plan(20), target="prise=40dB")


@pytest.mark.parametrize("text", ["cls=", "cls=40,50,60", "=40", "cls=40%", "nan"])
def test_what_is_no_target(text):
    with pytest.raises(PlanError, match="cls=40dB,price=30dB"):
        parse_target(text)


def test_a_file_keeps_the_outputs(measured, tmp_path):
    measured.save(tmp_path / "b.parquet")
    again = Budget.load(tmp_path / "b.parquet")
    assert again.about == measured.about
    formats = all_in(measured, "int8")
    # projections are stored in float32
    for kept, exact in zip(
        again.predict(formats).outputs, measured.predict(formats).outputs, strict=True
    ):
        assert kept.db == pytest.approx(exact.db, abs=1e-3)
    assert again.plan("cls=30dB").rules == measured.plan("cls=30dB").rules


def rewritten(path, change):
    facts = json.loads(pl.read_parquet_metadata(path)["roundoff"])
    change(facts)
    frame = pl.read_parquet(path)
    frame.write_parquet(path, metadata={"roundoff": json.dumps(facts)})


def test_files_of_one_output_without_its_name_are_read(tmp_path):
    """As they were written before outputs had names."""
    torch.manual_seed(0)
    one = budget(Workload(nn.Linear(4, 3), [torch.randn(8, 4)]), ["int8"])
    one.save(tmp_path / "b.parquet")

    def older(facts):
        del facts["schema"], facts["about"]["outputs"], facts["about"]["not_measured"]

    rewritten(tmp_path / "b.parquet", older)
    again = Budget.load(tmp_path / "b.parquet")
    assert [output.name for output in again.outputs] == ["output"]
    assert again.predict({"/linear": "int8"}).db == pytest.approx(
        one.predict({"/linear": "int8"}).db, abs=1e-3
    )
    assert again.plan(30).rules == one.plan(30).rules


def test_files_of_a_newer_version_are_refused(measured, tmp_path):
    measured.save(tmp_path / "b.parquet")
    rewritten(tmp_path / "b.parquet", lambda facts: facts.update(schema=99))
    with pytest.raises(PlanError, match="newer roundoff"):
        Budget.load(tmp_path / "b.parquet")


def test_one_output_costs_what_it_did():
    """One tensor: no rows beside its own, and the projections of plain sign vectors."""
    torch.manual_seed(0)
    one = budget(Workload(nn.Linear(4, 3), [torch.randn(8, 4)]), ["int8"], probes=3)
    columns = {len(row) for row in one.terms["projections"]}
    assert columns == {3 * 8}
    assert one.costs[0].output == ""


class Detector(nn.Module):
    """Three outputs of unlike shapes and scales: scores, boxes in pixels, small features."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3, padding=1)
        self.scores = nn.Conv2d(8, 5, 1)
        self.boxes = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        h = torch.relu(self.body(x))
        return {
            "scores": self.scores(h),
            "boxes": 640.0 * self.boxes(h).sigmoid(),
            "features": 1e-3 * h.mean((2, 3)),
        }


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class Cached(nn.Module):
    """Logits, and keys and values of six layers, the last of them large."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 20)

    def forward(self, x):
        past = []
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            scale = 100.0 if number == 5 else 1.0
            past.append((x * scale, x * 0.5))
        return {"logits": self.head(x), "past_key_values": tuple(past)}


def test_three_outputs_of_unlike_scales():
    torch.manual_seed(1)
    workload = Workload(Detector(), [torch.randn(12, 3, 6, 6)])
    measured = budget(workload, ["int8"], probes=16)
    formats = all_in(measured, "int8")
    actual = measured_db(workload, formats)
    predicted = {o.output: o.db for o in measured.predict(formats).outputs}
    assert list(predicted) == ["scores", "boxes", "features"]
    for name, db in actual.items():
        assert predicted[name] == pytest.approx(db, abs=1.5)
    found = verify(workload, measured.plan("scores=30dB,boxes=45dB"), budget=measured)
    assert found.met
    assert [row.target_db for row in found.outputs] == [30.0, 45.0, None]


def test_the_outputs_of_a_tuple_go_by_number(TwoHeads):
    def as_tuple(output):
        return output["cls"], output["price"], output["cls"].argmax(-1)

    torch.manual_seed(0)
    workload = Workload(Changed(TwoHeads(), as_tuple), [torch.randn(32, 16)])
    measured = budget(workload, ["int8"])
    assert [output.name for output in measured.outputs] == ["0", "1"]
    assert verify(workload, measured.plan("0=30dB,1=90dB"), budget=measured).met


def test_the_outputs_of_a_dataclass_go_by_field(TwoHeads):
    torch.manual_seed(0)
    model = Changed(TwoHeads(), lambda output: Pair(*output.values()))
    measured = budget(Workload(model, [torch.randn(32, 16)]), ["int8"])
    assert [output.name for output in measured.outputs] == ["first", "second"]


def test_many_tensors_become_one_output_in_which_each_counts_alike():
    torch.manual_seed(0)
    workload = Workload(Cached(), [torch.randn(40, 8)])
    measured = budget(workload, ["int8"], probes=16)
    assert [output.name for output in measured.outputs] == [
        "logits",
        "past_key_values.*",
    ]
    formats = all_in(measured, "int8")
    actual = measured_db(workload, formats)
    shares = [10 ** (-db / 10) for name, db in actual.items() if name != "logits"]
    mean = -10 * math.log10(sum(shares) / len(shares))
    predicted = {o.output: o.db for o in measured.predict(formats).outputs}
    assert predicted["past_key_values.*"] == pytest.approx(mean, abs=1.5)
    found = verify(workload, measured.plan("past_key_values=30dB"), budget=measured)
    row = found.outputs[1]
    assert (row.target_db, row.met) == (30.0, True)
    assert row.worst.startswith("past_key_values.")
    assert row.worst_db <= row.sqnr_db


def test_a_part_of_many_can_be_measured_apart():
    torch.manual_seed(0)
    workload = Workload(Cached(), [torch.randn(40, 8)])
    measured = budget(workload, ["int8"])
    with pytest.raises(PlanError, match="--of past_key_values.5.0"):
        measured.plan("past_key_values.5.0=30dB")
    apart = budget(workload.judging(apart=["past_key_values.5.0"]), ["int8"])
    assert [output.name for output in apart.outputs] == [
        "logits",
        "past_key_values.*",
        "past_key_values.5.0",
    ]
    found = verify(workload, apart.plan("past_key_values.5.0=30dB"), budget=apart)
    assert found.met
    assert found.outputs[2].target_db == 30.0


class WithLoss(nn.Module):
    """A model that returns a loss beside its outputs where it has labels."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels=None):
        output = self.model(x)
        if labels is None:
            return output
        return {"loss": nn.functional.cross_entropy(output["cls"], labels), **output}


def test_the_loss_is_no_output_unless_it_is_asked_for(TwoHeads):
    torch.manual_seed(0)
    model = WithLoss(TwoHeads())
    x = torch.randn(32, 16)
    plain = Workload(model, [x])
    labelled = Workload(model, [{"x": x, "labels": torch.arange(32) % 10}])
    without = budget(plain, ["int8"], probes=4)
    beside = budget(labelled, ["int8"], probes=4)
    assert [o.name for o in beside.outputs] == ["cls", "price"]
    assert "one number beside larger tensors" in beside.about.not_measured["loss"]
    formats = all_in(without, "int8")
    # the same signs, the same samples: the loss changes nothing
    assert beside.predict(formats).db == pytest.approx(without.predict(formats).db)
    found = verify(labelled, beside.plan(30), budget=beside)
    assert found.met
    assert [row.output for row in found.outputs] == ["cls", "price", "loss"]
    assert "one number beside larger tensors" in found.outputs[2].note
    asked = budget(labelled, ["int8"], of="loss")
    assert [o.name for o in asked.outputs] == ["loss"]
    named = budget(labelled.judging(apart=["loss"]), ["int8"])
    assert [o.name for o in named.outputs] == ["loss", "cls", "price"]
    with pytest.raises(WorkloadError, match="the target is the loss"):
        budget(plain, ["int8"], of="loss")


def test_bert_with_labels_is_judged_by_its_logits():
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=4,
    )
    model = hf.BertForSequenceClassification(config).eval()
    ids = torch.randint(0, 50, (12, 8))
    plain = Workload(model, [{"input_ids": ids}])
    labelled = Workload(model, [{"input_ids": ids, "labels": torch.arange(12) % 4}])
    without = measured_db(plain, _int8_linears(plain))
    beside = measured_db(labelled, _int8_linears(labelled))
    assert list(beside) == ["logits"]
    assert beside == pytest.approx(without)


def _int8_linears(workload):
    sites = run_batches(workload).handler.sites
    return {site: "int8" for site, kind in sites.items() if kind == "linear"}


def test_a_model_that_returns_one_number_is_judged_by_it(TwoHeads):
    torch.manual_seed(0)
    model = Changed(TwoHeads(), lambda output: output["cls"].square().mean())
    measured = budget(Workload(model, [torch.randn(8, 16)]), ["int8"])
    assert [output.name for output in measured.outputs] == ["output"]


def test_outputs_that_cannot_be_measured_are_rows_with_a_reason(TwoHeads):
    def more(output):
        zero = output["price"] * 0.0
        return {**output, "zero": zero, "cut": output["price"].detach()}

    torch.manual_seed(0)
    workload = Workload(Changed(TwoHeads(), more), [torch.randn(32, 16)])
    measured = budget(workload, ["int8"], probes=8)
    assert [output.name for output in measured.outputs] == ["cls", "price"]
    assert measured.about.not_measured == {
        "zero": "zero everywhere, so no ratio to it exists",
        "cut": "no gradient reaches it, so nothing is predicted of it",
    }
    found = verify(workload, measured.plan(30), budget=measured)
    rows = {row.output: row for row in found.outputs}
    assert rows["zero"].sqnr_db is None
    assert rows["zero"].note == "zero everywhere, so no ratio to it exists"
    assert rows["cut"].predicted_db is None
    assert rows["cut"].sqnr_db == pytest.approx(rows["price"].sqnr_db)
    assert found.met
    with pytest.raises(PlanError, match="did not measure cut"):
        measured.plan("cut=30dB")


def test_trials_measure_an_output_without_a_gradient(TwoHeads):
    def more(output):
        return {**output, "cut": output["price"].detach()}

    torch.manual_seed(0)
    workload = Workload(Changed(TwoHeads(), more), [torch.randn(32, 16)])
    measured = budget(workload, ["int8"])
    assert measured.about.trials == len(measured.costs)
    everything = {cost.site: "int8" for cost in measured.costs}
    predicted = {o.output: o.db for o in measured.predict(everything).outputs}
    assert predicted["cut"] == pytest.approx(predicted["price"])


def test_verify_of_one_output(workload, measured):
    plan = measured.plan(30)
    of_price = verify(workload, plan, of="price", target=90)
    assert [row.output for row in of_price.outputs] == ["price"]
    assert of_price.met
    assert not verify(workload, plan, of="cls", target=90).met
    of_cls = budget(workload, ["int8"], of="cls").plan(30)
    assert [row.output for row in verify(workload, of_cls).outputs] == ["cls"]


def test_noise_of_a_group_is_the_mean_of_its_tensors():
    exact = {f"a.{n}": torch.full((2,), 10.0**n) for n in range(9)}
    rounded = {name: t * 1.01 for name, t in exact.items()}
    rounded["a.3"] = exact["a.3"] * 1.1
    (row,) = output_noises([rounded], [exact])
    # eight tensors 1 % off, one 10 %; float32 keeps seven digits
    assert row.noise == pytest.approx((8 * 1e-4 + 1e-2) / 9, rel=1e-4)
    assert (row.output, row.worst) == ("a.*", "a.3")
