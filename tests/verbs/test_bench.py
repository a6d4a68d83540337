"""Configurations side by side: the steps against loops written out here in torch, what is restored, what fails."""

import copy
import dataclasses
import json
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import roundoff as ro
from roundoff.plan.rules import Plan
from roundoff.train.bench.observed_step import SavedBytes
from roundoff.train.bench.summary import Ratios, ratios
from roundoff.train.low_precision import METHODS
from roundoff.verbs.bench import bench

pytestmark = pytest.mark.filterwarnings("ignore:fp16 on")

generator = torch.Generator().manual_seed(0)
DATA = [
    (
        torch.randn(12, 6, generator=generator),
        torch.randint(0, 3, (12,), generator=generator),
    )
    for _ in range(4)
]


def model():
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 3)
    )


def forward(model, batch):
    return model(batch[0])


def loss(output, batch):
    return functional.cross_entropy(output, batch[1])


def optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.2, momentum=0.5)


def accuracy(outputs, batches):
    return sum(
        (o.argmax(-1) == b[1]).double().mean().item()
        for o, b in zip(outputs, batches, strict=True)
    ) / len(outputs)


def workload(**changes):
    parts = {
        "forward": forward,
        "loss": loss,
        "optimizer": optimizer,
        "metric": accuracy,
    } | changes
    return ro.Workload(parts.pop("model", model), parts.pop("batches", DATA), **parts)


def row(found, name):
    return next(r for r in found.rows if r.config == name)


def test_losses_are_those_of_a_loop_written_out():
    found = bench(
        workload(model=lambda: nn.Linear(6, 3)), ["fp32", "bf16"], steps=9, seeds=[5]
    )
    for name, around in (
        ("fp32", torch.autocast("cpu", enabled=False)),
        ("bf16", torch.autocast("cpu", torch.bfloat16)),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            net = nn.Linear(6, 3)
        order, draw = [], torch.Generator().manual_seed(5)
        while len(order) < 9:
            order += torch.randperm(4, generator=draw).tolist()
        stepper, losses = optimizer(net), []
        for number in order[:9]:
            with around:
                value = loss(net(DATA[number][0]), DATA[number])
            stepper.zero_grad()
            value.backward()
            stepper.step()
            losses.append(value.item())
        assert found.summary.curves[name] == [losses]


def test_the_same_configuration_twice_is_equal_also_with_dropout():
    found = bench(workload(), ["bf16", "bf16"], steps=8, seeds=3)
    assert found.summary.curves["bf16"] == found.summary.curves["bf16 (2)"]
    assert row(found, "bf16 (2)").verdict == "no difference seen"
    assert row(found, "bf16 (2)").loss.reason == "equal for every seed"
    one, two, three = found.summary.curves["bf16"]
    assert one != two != three
    assert found.agrees


def test_dropout_draws_are_those_of_the_reference_in_every_configuration():
    # fp64 rounds 2^29 times finer, so its losses agree to fp32's precision only where the same elements were dropped
    found = bench(
        workload(), ["fp32", "fp64", "fp32+fused", "fp32+threads=2"], steps=6, seeds=1
    )
    ours = found.summary.curves["fp32"][0]
    for name in ("fp64", "fp32+fused", "fp32+threads=2"):
        # 6 steps of some 200 products, each relative to 2^-24: 1e-5 leaves a factor of 100
        assert found.summary.curves[name][0] == pytest.approx(ours, rel=1e-5)


def test_parts_of_a_batch_give_the_gradient_of_the_whole():
    plain = workload(model=lambda: nn.Linear(6, 3))
    found = bench(
        plain, ["fp32", "fp32+accumulate=3", "fp32+accumulate=5"], steps=6, seeds=1
    )
    ours = found.summary.curves["fp32"][0]
    for name in (
        "fp32+accumulate=3",
        "fp32+accumulate=5",
    ):  # 12 in parts of 4, and of 3 and 2: weighted by their size
        assert found.summary.curves[name][0] == pytest.approx(ours, rel=1e-5)


@pytest.mark.parametrize("given", ["function", "module"])
def test_nothing_of_workload_and_process_changes(given):
    torch.manual_seed(3)
    net = model().eval()
    subject = workload(model=model if given == "function" else net)
    before = copy.deepcopy(subject.model.state_dict())
    subject.model[0].weight.grad = torch.ones_like(subject.model[0].weight)
    modes = [module.training for module in subject.model.modules()]
    data = copy.deepcopy(DATA)
    random, threads, dtype = (
        torch.get_rng_state(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
    )
    scaler = dict(vars(torch.amp.GradScaler))

    def by_hand(model, optimizer, batch):
        raise ValueError("no")

    configs = [
        "fp64+channels_last",
        "fp16",
        "tf32+checkpoint",
        "bf16+weights=bf16+threads=1",
        "compile=eager",
        by_hand,
    ]
    bench(subject, configs, steps=4, seeds=2)
    assert all(
        torch.equal(value, before[name])
        for name, value in subject.model.state_dict().items()
    )
    assert torch.equal(subject.model[0].weight.grad, torch.ones(16, 6))
    assert [module.training for module in subject.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
    assert dict(vars(torch.amp.GradScaler)) == scaler
    assert all(
        torch.equal(x, a) and torch.equal(y, b)
        for (x, y), (a, b) in zip(DATA, data, strict=True)
    )


def test_seeds_with_and_without_model():
    drawn = bench(workload(), ["fp32"], steps=3, seeds=2).summary
    assert drawn.weights == "drawn anew by model() under each seed"
    given = bench(workload(model=model()), ["fp32"], steps=3, seeds=2).summary
    assert given.weights.startswith(
        "the same for every seed, which changes the order of the batches"
    )


def test_the_metric_is_of_what_is_held_out_in_eval_mode():
    seen = []

    def metric(outputs, batches, reference):
        seen.append(
            (len(batches), batches[0][0].shape[0], outputs[0].dtype, reference[0].dtype)
        )
        return accuracy(outputs, batches)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            assert self.training == (len(x) == 12)  # the held-out batch has 5 samples
            return self.linear(x)

    held_out = [(torch.randn(5, 6), torch.zeros(5, dtype=torch.int64))]
    found = bench(
        workload(model=Net, metric=metric, held_out=held_out),
        ["fp32", "bf16"],
        steps=3,
        seeds=1,
    )
    assert seen == [
        (1, 5, torch.float32, torch.float32),
        (1, 5, torch.bfloat16, torch.float32),
    ]
    assert found.summary.held_out == 1


def test_a_plan_file(tmp_path):
    Plan.from_formats({"0/linear": "bf16"}, {}).save(tmp_path / "plan.toml")
    plan = str(tmp_path / "plan.toml")
    found = bench(workload(), ["fp32", plan, plan + "+checkpoint"], steps=4, seeds=1)
    assert [r.failed for r in found.rows] == [None] * 3
    assert found.rows[1].seen.matrix["forward"] == {"bf16": 1, "fp32": 1}
    assert found.summary.curves[plan] == found.summary.curves[plan + "+checkpoint"]


def test_what_fails_is_a_row_and_the_others_go_on():
    def by_hand(model, optimizer, batch):
        raise ValueError("not today")

    found = bench(
        workload(),
        ["fp32", by_hand, "fp16+weights=fp16", "cuda:77", "bf16+accumulate=13"],
        steps=4,
        seeds=2,
    )
    reasons = [r.failed for r in found.rows]
    assert reasons[0] is None
    assert (
        "a training step of by hand raised ValueError: ValueError: not today"
        in reasons[1]
    )
    assert "float16" in reasons[2]
    assert "there is no device cuda:77 here" in reasons[3]
    assert "a batch cannot be cut into 13 parts" in reasons[4]
    assert not found.agrees
    assert len(found.summary.curves["fp32"]) == 2
    assert "fp32 was trained with 2 seeds" not in str(found)
    assert "could not be trained" in str(found)


def test_an_operator_without_a_kernel_is_a_row():
    recurrent = workload(
        model=lambda: nn.LSTM(6, 3), forward=lambda model, batch: model(batch[0])[0]
    )
    try:
        with torch.autocast("cpu", torch.float16):
            nn.LSTM(6, 3)(DATA[0][0])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
    else:
        pytest.skip("this CPU has an fp16 LSTM")
    found = bench(recurrent, ["fp32", "fp16", "fp64"], steps=3, seeds=1)
    assert reason in found.rows[1].failed
    assert [bool(r.failed) for r in found.rows] == [False, True, False]


def test_everything_fails():
    with pytest.raises(ro.RoundoffError, match="raised RuntimeError"):
        bench(
            workload(loss=lambda output, batch: output @ output),
            ["fp32", "bf16"],
            steps=3,
        )


def test_the_first_fails():
    found = bench(workload(), ["cuda:77", "fp32"], steps=4, seeds=2)
    assert row(found, "fp32").speed is None
    assert row(found, "fp32").verdict is None
    assert not found.agrees


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"loss": None},
            {},
            "workload: loss missing\n  expected: a workload that says how it is trained\n"
            "  do: define loss(output, batch)",
        ),
        (
            {"loss": None, "optimizer": None},
            {},
            "do: define loss(output, batch) and define optimizer(model)",
        ),
        (
            {},
            {"steps": 2},
            "expected: more than 2 steps, and seeds from 0 on, each once\n  got: steps=2, seeds=[0, 1, 2]",
        ),
        ({}, {"seeds": []}, "seeds=[]"),
        ({}, {"seeds": [1, 1]}, "seeds=[1, 1]"),
    ],
)
def test_bad_input(changes, options, message):
    with pytest.raises(ro.RoundoffError) as caught:
        bench(workload(**changes), ["fp32"], **options)
    assert message in str(caught.value)


def test_nan_in_the_data():
    spoilt = [DATA[0], (DATA[1][0] * math.nan, DATA[1][1])]
    found = bench(
        workload(batches=spoilt, metric=None), ["fp32", "bf16"], steps=4, seeds=2
    )
    assert found.summary.notes == ["batch 1 of the workload holds NaN or Inf"]
    for r in found.rows:
        assert r.nonfinite.startswith("loss nan at step ")
    assert (
        found.rows[1].loss.reason
        == "the first configuration itself has no finite result"
    )
    assert "Batch 1 of the workload holds NaN or Inf." in str(found)
    json.dumps(dataclasses.asdict(found.summary))


def test_one_that_diverges_is_worse():
    def diverging(model, optimizer, batch):
        optimizer.zero_grad()
        value = loss(forward(model, batch), batch) * 1e30
        value.backward()
        optimizer.step()
        return value

    found = bench(workload(), ["fp32", diverging], steps=6, seeds=3)
    assert found.rows[1].worse
    assert not found.agrees
    assert "diverging ends with a loss that is not finite." in str(found)


def test_the_loss_scale_skips_and_says_so():
    found = bench(
        workload(),
        ["fp32", "fp16+scale=dynamic:1e9", "fp16", "fp16+scale=static:1e12"],
        steps=25,
        seeds=1,
    )
    first = row(found, "fp16+scale=dynamic:1e9")
    # torch's rule halves at each skip, from 1e9 until no gradient overflows
    assert first.skips > 5
    assert first.scale == 1e9 / 2**first.skips
    assert first.memory.gradients == 4 * (6 * 16 + 16 + 16 * 3 + 3)
    assert row(found, "fp16").skips == 0
    assert row(found, "fp16+scale=static:1e12").failed.startswith(
        "step 19 of seed 0: 20 steps in a row were skipped"
    )


def test_fp16_on_a_cpu_warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = bench(workload(), ["fp32", "fp16"], steps=3, seeds=1)
    if torch.cpu._is_amx_fp16_supported():
        pytest.skip("this CPU computes in fp16")
    assert any(
        "16 to 32 times slower" in str(w.message) and "bf16" in str(w.message)
        for w in caught
    )
    assert "bf16 is what a CPU trains in" in row(found, "fp16").notes[0]


def published(model, optimizer, batch):
    pictures, labels = batch
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        value = functional.cross_entropy(model(pictures.half()), labels)
    scaler.scale(value).backward()
    optimizer.step()
    return value


SCALER = torch.amp.GradScaler("cpu")


def proper(model, optimizer, batch):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model(batch[0]), batch)
    SCALER.scale(value).backward()
    SCALER.unscale_(optimizer)
    SCALER.step(optimizer)
    SCALER.update()
    return value


def test_what_a_step_by_hand_does_wrong():
    adam = workload(optimizer=lambda model: torch.optim.Adam(model.parameters()))
    found = bench(adam, ["fp32", published, proper], steps=4, seeds=1)
    findings = row(found, "published").findings
    assert [finding.split(":")[0].split(" that ")[0] for finding in findings] == [
        "the GradScaler is made in every step",
        "optimizer.step() runs on gradients",
        "scaler.update() is never called",
        "the inputs are cast to fp16 by hand",
    ]
    assert "65,536 times too large" in findings[1]
    assert row(found, "proper").findings == []
    assert row(found, "fp32").findings == []


def test_formats_of_the_matrix_work():
    found = bench(workload(), ["fp32", "bf16", "fp64"], steps=3, seeds=1)
    # two products forward; backward two for the weights and one for the hidden layer
    for name in ("fp32", "bf16", "fp64"):
        assert row(found, name).seen.matrix == {
            "forward": {name: 2},
            "backward": {name: 3},
        }
    # forward: input, two weights, two biases, logits for the loss; backward: five gradients and that of the logits; hidden
    # activations stay in bf16
    assert row(found, "bf16").seen.casts >= 10
    assert row(found, "fp32").seen.casts == 0


def test_memory_of_a_layer_by_hand():
    net = nn.Sequential(nn.Linear(6, 16, bias=False), nn.ReLU())
    kept = SavedBytes(net)
    with kept.forward():
        out = net(torch.randn(10, 6)).square().sum()
    # the input of the product, and the output of relu, which square keeps too; not the weights
    assert kept.most == 4 * (10 * 6 + 10 * 16)
    out.backward()


def test_memory_is_counted():
    adam = workload(optimizer=lambda model: torch.optim.Adam(model.parameters()))
    found = bench(adam, ["fp32", "fp64", "fp32+weights=bf16"], steps=3, seeds=1)
    weights = 6 * 16 + 16 + 16 * 3 + 3
    ours = row(found, "fp32").memory
    assert (ours.parameters, ours.gradients) == (4 * weights, 4 * weights)
    assert (
        ours.optimizer == 8 * weights + 4 * 4
    )  # two moments, and a step count in fp32 for each of four tensors
    assert ours.total == ours.parameters + ours.gradients + ours.optimizer + ours.saved
    assert row(found, "fp64").memory.parameters == 8 * weights
    assert row(found, "fp32+weights=bf16").memory.parameters == 2 * weights


def test_rounded_updates_train_weights_that_nearest_leaves_as_they_are():
    # Adam's updates are about lr = 2^-12; bf16 weights from 1/8 on have neighbours 2^-10 apart
    slow = workload(
        model=lambda: nn.Linear(6, 3),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), 2**-12),
    )
    nearest = "weights=bf16"
    configs = ["fp32", nearest, *(f"{nearest}+updates={m}" for m in METHODS)]
    result = bench(slow, configs, steps=300, seeds=1)
    assert [r.failed for r in result.rows] == [None] * 5
    losses = {r.config: r.loss.mean for r in result.rows}
    lost = losses[nearest] - losses["fp32"]
    assert losses[f"{nearest}+updates=nearest"] - losses["fp32"] > lost / 2
    for method in ("stochastic", "kahan"):
        assert abs(losses[f"{nearest}+updates={method}"] - losses["fp32"]) < lost / 5
    memory = {r.config: r.memory.optimizer for r in result.rows}
    compensation = 2 * (6 * 3 + 3)  # 2 bytes a weight
    stochastic = memory[f"{nearest}+updates=stochastic"]
    assert memory[f"{nearest}+updates=kahan"] == stochastic + compensation


def test_rounded_updates_need_weights_in_low_precision():
    result = bench(workload(), ["fp32", "fp32+updates=stochastic"], steps=3, seeds=1)
    assert "no parameter is in low precision" in result.rows[1].failed


def test_checkpointing_keeps_less_and_computes_the_same():
    def blocks():
        return nn.ModuleList(
            [
                nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6))
                for _ in range(4)
            ]
        )

    deep = workload(model=blocks, forward=chain)
    found = bench(deep, ["fp32", "fp32+checkpoint"], steps=4, seeds=1)
    assert found.summary.curves["fp32"] == found.summary.curves["fp32+checkpoint"]
    plain, less = (r.memory.saved for r in found.rows)
    assert less < plain / 2


def chain(model, batch):
    x = batch[0]
    for block in model:
        x = x + block(x)
    return x[:, :3]


def test_ratios():
    assert ratios([1.0, 2.0, 3.0, math.nan]) == Ratios(2.0, 1.0, 3.0, 3)
    assert ratios([2.0]).low == 2.0
