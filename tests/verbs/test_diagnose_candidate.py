"""roundoff.diagnose with a candidate: the wrong operator is named, bug and rounding are told apart, all is as before."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn

import roundoff
from roundoff import Workload, diagnose
from roundoff.errors import FormatError, RunError, WorkloadError
from roundoff.verbs.diagnose_candidate import CandidateDiagnosis
from roundoff.verbs.fp64_referee import verdict

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16, eps={eps}), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.first(x))))

def model():
    with torch.random.fork_rng():
        torch.manual_seed({seed})
        return Net()

def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn({rows}, 8, generator=generator) for _ in range(2)]
"""
TRAINED = """
def loss(output, batch):
    return output.square().mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.fixture
def write(tmp_path):
    """A workload file by name; ``eps``, ``seed`` and ``rows`` may differ, ``more`` is put at its end."""

    def file(name, *, eps=1e-5, seed=0, rows=6, more=""):
        path = tmp_path / name
        path.write_text(
            FILE.format(eps=eps, seed=seed, rows=rows) + textwrap.dedent(more)
        )
        return path

    return file


def state(model):
    """Everything that a recording could leave behind."""
    return {
        "values": {n: t.clone() for n, t in model.state_dict().items()},
        "grads": [p.grad for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
        ],
        "rng": torch.get_rng_state(),
        "flags": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.backends.mkldnn.enabled,
            torch.is_autocast_enabled("cpu"),
        ),
    }


def same(one, two):
    return (
        all(
            torch.equal(v, two["values"][n]) and v.dtype == two["values"][n].dtype
            for n, v in one["values"].items()
        )
        and torch.equal(one["rng"], two["rng"])
        and all(one[k] == two[k] for k in ("modes", "hooks", "flags"))
        and all(a is b for a, b in zip(one["grads"], two["grads"], strict=True))
    )


@pytest.mark.parametrize("more", ["", TRAINED])
def test_a_wrong_constant_is_named_and_a_bug(write, more):
    workload = Workload.load(write("good.py", more=more))
    found = diagnose(workload, candidate=write("wrong.py", eps=0.1))
    named = found.comparison.divergence
    assert named is not None
    assert named.site.startswith("norm/")
    assert found.higher_precision.verdict == "bug"
    # the same wrong constant makes the same error in either format, up to rounding
    assert found.higher_precision.error_fp64 == pytest.approx(
        found.higher_precision.error, rel=1e-3
    )
    # LayerNorm divides by sqrt(var + eps): against fp64 arithmetic on the same weights
    with torch.no_grad():
        x = workload.model.first.double()(workload.batches[0].double())
        middle, spread = (
            x - x.mean(1, keepdim=True),
            x.var(1, correction=0, keepdim=True),
        )
        true, wrong = (middle / (spread + eps).sqrt() for eps in (1e-5, 0.1))
    workload.model.first.float()
    assert found.higher_precision.error_fp64 == pytest.approx(
        float((true - wrong).norm() / true.norm()), rel=1e-6
    )
    assert not found.agrees
    assert found.diagnosis is None


SEEDED = "torch.randn(6, 8, generator=generator)"


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (f"0.5 * {SEEDED}", "is 0.5 times the reference's"),
        (f"3 * {SEEDED} - 1", "is the reference's times 3 plus -1: scaled otherwise"),
        (f"{SEEDED}.flip(0)", "has the same 6 samples in another order"),
        (f"{SEEDED}.flip(0).square()", "has other values"),
    ],
)
def test_other_data_of_the_candidates_file_are_said_first(write, batch, words):
    port = write("port.py")
    port.write_text(port.read_text().replace(SEEDED, batch))
    found = diagnose(Workload.load(write("good.py")), candidate=port)
    assert not found.agrees
    first = found.comparison.divergence
    assert (first.kind, first.looks_like, first.name) == (
        "data",
        "other data",
        "input 0",
    )
    said = found.comparison.answer
    assert f"the candidate's batches() give other data: input 0 {words}" in said
    assert "input 0 of batch 1" not in said  # as in the first
    # the comparison itself ran on the reference's data
    assert "On the same data the runs agree." in said
    assert found.comparison.table["error"].max() == 0


def test_a_model_is_judged_beside_other_data(write):
    port = write("port.py", eps=0.1)
    port.write_text(port.read_text().replace(SEEDED, f"0.5 * {SEEDED}"))
    found = diagnose(Workload.load(write("good.py")), candidate=port)
    data, operator = found.comparison.culprits()[:2]
    assert data.kind == "data"
    assert operator.site.startswith("norm/")
    assert found.higher_precision.verdict == "bug"


def test_the_same_data_up_to_rounding_are_the_same(write):
    port = write("port.py")
    port.write_text(port.read_text().replace(SEEDED, f"({SEEDED} * 3) / 3"))
    assert diagnose(Workload.load(write("good.py")), candidate=port).agrees


def test_a_candidate_without_batches_is_fed_the_references(write):
    port = write("port.py", eps=0.1)
    port.write_text(port.read_text().partition("def batches")[0])
    found = diagnose(Workload.load(write("good.py")), candidate=port)
    [culprit] = found.comparison.culprits()
    assert culprit.kind == "operator"
    assert culprit.site.startswith("norm/")


def test_data_drawn_anew_each_time_are_a_note(write):
    for name in ("good.py", "port.py"):
        path = write(name)
        drawn = path.read_text().replace(SEEDED, "torch.randn(6, 8)")
        path.write_text(drawn)
    found = diagnose(
        Workload.load(path.with_name("good.py")), candidate=path.with_name("port.py")
    )
    assert found.agrees
    assert any("are other ones each time" in note for note in found.summary.notes)


def test_bf16_of_a_clean_model_is_rounding(write, tmp_path):
    workload = Workload.load(write("good.py", more=TRAINED))
    found = diagnose(workload, candidate="bf16", output=tmp_path / "out", target="20dB")
    assert isinstance(found, CandidateDiagnosis)
    assert found.comparison.agrees, found.comparison.culprits()
    assert found.comparison.culprits() == []
    assert found.higher_precision.verdict == "rounding"
    assert (
        2**-14 < found.higher_precision.error < 2**-4
    )  # u = 2**-8 through three operators
    assert found.higher_precision.error_fp64 == 0
    assert found.unstable.is_empty()
    assert found.diagnosis is not None
    assert found.diagnosis.verification.met
    assert found.agrees
    assert sum(row.share for row in found.summary.rounding) == pytest.approx(
        1.0, rel=1e-9
    )
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "reference",
        "candidate",
        "comparison",
    }
    phases = set(
        roundoff.load(str(tmp_path / "out" / "candidate")).ops.collect()["phase"]
    )
    assert phases == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize(
    "candidate",
    ["compile", "channels_last", "threads=1", "mkldnn=off", "float64", "cpu"],
)
def test_honest_changes_agree_and_nothing_stays_behind(write, candidate):
    workload = Workload.load(write("good.py", more=TRAINED))
    workload.model.first.weight.grad = torch.ones(16, 8)
    before = state(workload.model)
    found = diagnose(
        workload,
        candidate=candidate,
        backend="aot_eager" if candidate == "compile" else None,
        steps=2,
    )
    assert found.comparison.agrees, found.comparison.culprits()
    assert found.agrees
    assert (
        found.higher_precision is None or found.higher_precision.verdict == "rounding"
    )
    assert same(before, state(workload.model))


def test_what_does_not_repeat_itself_is_said_and_not_blamed(write):
    more = """
    def forward(model, batch):
        x = model.first(batch)
        return model.head(x + torch.rand(x.shape, generator=entropy))

    entropy = torch.Generator()
    entropy.seed()
    """
    found = diagnose(
        Workload.load(write("random.py", more=more)), candidate="threads=1", noise=1
    )
    assert {row.side for row in found.summary.unstable} == {
        "reference",
        "candidate",
    }
    assert all(row.site.startswith("/rand") for row in found.summary.unstable)
    assert found.comparison.agrees, found.comparison.culprits()
    assert found.higher_precision.verdict == "undecided"
    assert "does not repeat itself" in found.higher_precision.reason


def test_all_is_as_before_after_an_exception(write):
    more = (
        TRAINED
        + """
def forward(model, batch):
    torch.set_num_threads(1)
    model.norm.eval()
    model(batch).sum().backward()
    raise ValueError("no")
"""
    )
    workload = Workload.load(write("bad.py", more=more))
    torch.set_num_threads(2)
    before = state(workload.model)
    for candidate in ("bf16", "float64"):
        with pytest.raises(WorkloadError, match="raised ValueError"):
            diagnose(workload, candidate=candidate)
        assert same(before, state(workload.model))


def test_a_program_that_cannot_run_in_fp64_is_undecided(write):
    more = """
    import numpy as np

    def forward(model, batch):
        return model(torch.from_numpy(batch.numpy().astype(np.float32)))
    """
    found = diagnose(
        Workload.load(write("good.py", more=more)),
        candidate=write("wrong.py", eps=0.1, more=more),
    )
    assert found.comparison.divergence.site.startswith("norm/")
    assert found.higher_precision.verdict == "undecided"
    assert found.higher_precision.reason.startswith("not run in fp64: ")


CASTS = """
    def forward(model, batch):
        return model(batch.to(torch.float32))
    """


def test_a_program_that_casts_to_fp32_stays_in_fp64(write):
    """Its own casts would leave the rounding of fp32 in both fp64 runs: no bug, but it would look like one."""
    reference = Workload.load(write("good.py", more=CASTS))
    wrong = diagnose(reference, candidate=write("wrong.py", eps=0.1, more=CASTS))
    assert wrong.higher_precision.verdict == "bug"
    right = diagnose(reference, candidate="threads=2")
    assert right.agrees


def test_other_weights_are_said(write):
    found = diagnose(
        Workload.load(write("good.py")), candidate=write("other.py", seed=1)
    )
    assert (
        "the models start from other values: first.weight, first.bias, head.weight and 1 more"
        in found.summary.notes
    )
    assert found.higher_precision.verdict == "undecided"
    assert "before anything runs: weights or data" in found.higher_precision.reason
    assert not found.agrees


@pytest.mark.parametrize(
    ("candidate", "error", "message"),
    [
        (
            "bf61",
            WorkloadError,
            "candidate: there is no such candidate\n  expected: bf16 or fp16, compile",
        ),
        ("threads=0", WorkloadError, "there is no such candidate"),
        ("meta", WorkloadError, "there is no such candidate"),
        (
            "fp8_e4m3fn",
            FormatError,
            "torch cannot run a model in fp8_e4m3fn, so there is nothing to record",
        ),
        (
            "int8",
            FormatError,
            "leave the candidate out: 'roundoff diagnose WORKLOAD --formats int8'",
        ),
        ("nowhere.py", WorkloadError, "no such file"),
    ],
)
def test_bad_candidates(candidate, error, message):
    with pytest.raises(error) as raised:
        diagnose(Workload(nn.Linear(2, 1), [torch.ones(3, 2)]), candidate=candidate)
    assert message in str(raised.value)


def test_bad_arguments(write, monkeypatch, tmp_path):
    workload = Workload(nn.Linear(2, 1), [torch.ones(3, 2)], name="tiny")
    with pytest.raises(WorkloadError, match="a backend is one of torch.compile"):
        diagnose(workload, candidate="bf16", backend="aot_eager")
    with pytest.raises(WorkloadError, match="torch.compile has no such backend"):
        diagnose(workload, candidate="compile", backend="nothing")
    with pytest.raises(RunError, match="steps=0"):
        diagnose(workload, candidate="bf16", steps=0)
    with pytest.raises(RunError, match="steps: only used with a candidate"):
        diagnose(workload, ["bf16"], steps=2)
    with pytest.raises(
        WorkloadError,
        match=r"batch 0 is another one .* tiny\n.*float32\[3, 2\]\n.*float32\[6, 8\]",
    ):
        diagnose(workload, candidate=write("other.py"))
    (tmp_path / "empty.py").write_text("batches = [1]")
    with pytest.raises(WorkloadError, match=r"model\(\) missing"):
        diagnose(workload, candidate=tmp_path / "empty.py")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(WorkloadError, match=r"needs a C\+\+ compiler"):
        diagnose(workload, candidate="compile")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    with pytest.raises(WorkloadError, match="there is no device cuda here"):
        diagnose(Workload(nn.Linear(2, 1), [torch.ones(3, 2)]), candidate="cuda")


@pytest.mark.parametrize("unit", [2.0**-8, 2.0**-11, 2.0**-24])
def test_the_verdict_of_errors_that_scale_with_the_format(unit):
    for amplified in (
        1.0,
        30.0,
        1000.0,
    ):  # rounding: the same factor times either unit roundoff
        assert verdict(amplified * unit, amplified * 2.0**-53, unit) == "rounding"
    for wrong in (1.0, 1e-3, 32 * unit):  # a wrong constant: the same in both
        assert verdict(wrong, wrong, unit) == "bug"
    assert verdict(float("inf"), 0.0, unit) == "rounding"  # overflow
    assert verdict(float("nan"), float("nan"), unit) == "bug"
